#pragma once

/// Everything in brim. A program that uses one part compiles faster with that part's header alone.

// IWYU pragma: begin_exports
#include <brim/adapt/adapt.h>
#include <brim/adapt/size_memory.h>
#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <brim/memory/cpu.h>
#include <brim/memory/host_memory.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/runtime.h>
#include <brim/testing/oom_injector.h>
#include <brim/version.h>
// IWYU pragma: end_exports
