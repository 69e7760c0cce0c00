#pragma once

/// Everything in brim but the layers as modules (brim/nn/modules.h), RestoredOptimizer
/// (brim/adapt/restore_optimizer.h) and refuse_whole_batch (brim/adapt/whole_batch.h), which need
/// torch::nn's and torch::optim's headers. A program that uses one part compiles faster with that
/// part's header alone.

// IWYU pragma: begin_exports
#include <brim/adapt/adapt.h>
#include <brim/adapt/agreement.h>
#include <brim/adapt/collect.h>
#include <brim/adapt/joint_loss.h>
#include <brim/adapt/microbatches.h>
#include <brim/adapt/saved_state.h>
#include <brim/adapt/size_memory.h>
#include <brim/batching/balance.h>
#include <brim/batching/batch_fill.h>
#include <brim/batching/batches.h>
#include <brim/batching/batching.h>
#include <brim/batching/buckets.h>
#include <brim/batching/cost.h>
#include <brim/batching/document_parts.h>
#include <brim/batching/even_work.h>
#include <brim/batching/interruption.h>
#include <brim/batching/look_ahead.h>
#include <brim/batching/mixture.h>
#include <brim/batching/packed_row.h>
#include <brim/batching/plan.h>
#include <brim/batching/sample_index.h>
#include <brim/batching/sample_sizes.h>
#include <brim/batching/sample_stream.h>
#include <brim/batching/stream.h>
#include <brim/explain/shortage.h>
#include <brim/fit/even_steps.h>
#include <brim/fit/fit_batching.h>
#include <brim/fit/fit_ranks.h>
#include <brim/fit/model_limit.h>
#include <brim/fit/padded_need.h>
#include <brim/memory/block_watch.h>
#include <brim/memory/budget.h>
#include <brim/memory/bytes.h>
#include <brim/memory/cpu.h>
#include <brim/memory/host_limit.h>
#include <brim/memory/host_memory.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/peak_meter.h>
#include <brim/memory/release.h>
#include <brim/memory/stats.h>
#include <brim/need/trace_search.h>
#include <brim/nn/audit.h>
#include <brim/nn/convert.h>
#include <brim/nn/functional.h>
#include <brim/nn/losses.h>
#include <brim/nn/rerun.h>
#include <brim/nn/saving.h>
#include <brim/nn/subclasses.h>
#include <brim/nn/watching.h>
#include <brim/predict/allocator_model.h>
#include <brim/predict/allocator_settings.h>
#include <brim/predict/collect_peaks.h>
#include <brim/predict/least_kept.h>
#include <brim/predict/memory_model.h>
#include <brim/predict/memory_trace.h>
#include <brim/predict/polynomial_regression.h>
#include <brim/predict/probe.h>
#include <brim/runtime.h>
#include <brim/testing/oom_injector.h>
#include <brim/text_table.h>
#include <brim/version.h>
// IWYU pragma: end_exports
