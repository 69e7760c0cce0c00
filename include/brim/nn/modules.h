#pragma once

/// Every layer as a module of torch::nn. The modules of torch::nn that they stand on take seconds
/// to compile: a program that uses one kind compiles faster with that kind's header alone.

// IWYU pragma: begin_exports
#include <brim/nn/activation.h>
#include <brim/nn/conv.h>
#include <brim/nn/dropout.h>
#include <brim/nn/linear.h>
#include <brim/nn/norm.h>
#include <brim/nn/pooling.h>
// IWYU pragma: end_exports
