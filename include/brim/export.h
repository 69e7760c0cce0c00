#pragma once

/// Marks what libbrim exports; everything else has hidden visibility.
#if defined(_WIN32)
#if defined(BRIM_BUILDING)
#define BRIM_API __declspec(dllexport)
#else
#define BRIM_API __declspec(dllimport)
#endif
#else
#define BRIM_API __attribute__((visibility("default")))
#endif
