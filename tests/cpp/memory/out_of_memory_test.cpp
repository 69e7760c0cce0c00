#include <brim/memory/budget.h>
#include <brim/memory/cpu.h>
#include <brim/memory/out_of_memory.h>
#include <brim/memory/stats.h>
#include <c10/util/Exception.h>
#include <c10/util/Lazy.h>
#include <gtest/gtest.h>

#include <exception>
#include <future>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "tensors.h"

namespace brim {
namespace {

const c10::SourceLocation kHere{"work", "work.cpp", 1};

template <class Error>
std::exception_ptr torch_error(const std::string& message) {
  return std::make_exception_ptr(Error(kHere, message));
}

std::exception_ptr runtime_api_error(int code, const std::string& message) {
  return std::make_exception_ptr(c10::AcceleratorError(kHere, code, message));
}

struct Row {
  std::string source;
  std::exception_ptr error;
  OomKind kind;
  std::optional<c10::Device> device;
  std::optional<std::int64_t> requested;
};

const std::string kCudaText =
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB of "
    "which 1.50 GiB is "
    "free. Of the allocated memory 75.00 GiB is allocated by PyTorch, and 1.20 GiB is reserved by "
    "PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.";

const std::string kCudnnText =
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.";

/// Each row of the table in docs/explanation/memory.md, as C++ code meets it.
std::vector<Row> known_failures() {
  const c10::Device cpu(at::kCPU);
  const c10::Device cuda(at::kCUDA);
  const c10::Device mps(at::kMPS);
  constexpr std::int64_t kGibibyte = std::int64_t{1} << 30;
  using OomKind::device_memory;
  using OomKind::host_memory;
  using OomKind::library_workspace;
  using OomKind::size_limit;
  return {
      {"CUDA allocator", torch_error<c10::OutOfMemoryError>(kCudaText), device_memory,
       c10::Device(at::kCUDA, 1), 2 * kGibibyte},
      {"CUDA allocator, asked for the impossible",
       torch_error<c10::OutOfMemoryError>(
           "CUDA out of memory. Tried to allocate more than 1EB memory."),
       device_memory, cuda, std::nullopt},
      {"HIP allocator",
       torch_error<c10::OutOfMemoryError>(
           "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
           "capacity of 63.98 GiB of which 0 bytes is free."),
       device_memory, c10::Device(at::kCUDA, 0), 20LL << 20},
      {"XPU allocator",
       torch_error<c10::OutOfMemoryError>(
           "XPU out of memory. Tried to allocate 512.00 KiB. GPU 3 has a total "
           "capacity of 47.00 GiB."),
       device_memory, c10::Device(at::kXPU, 3), 512LL << 10},
      {"an allocator that brim does not know",
       torch_error<c10::OutOfMemoryError>("no room. Tried to allocate 3 bytes"), device_memory,
       std::nullopt, 3},
      {"CUDA runtime",
       runtime_api_error(2,
                         "CUDA error: out of memory\nCUDA kernel errors might be asynchronously"),
       device_memory, cuda, std::nullopt},
      {"CUDA runtime, the code alone", runtime_api_error(2, "something went wrong"), device_memory,
       std::nullopt, std::nullopt},
      {"CUDA runtime before it had a type", torch_error<c10::Error>("CUDA error: out of memory"),
       device_memory, cuda, std::nullopt},
      {"CUDA driver", torch_error<c10::Error>("CUDA driver error: out of memory"), device_memory,
       cuda, std::nullopt},
      {"HIP runtime", torch_error<c10::Error>("HIP error: out of memory\nHIP kernel errors"),
       device_memory, cuda, std::nullopt},
      {"Triton", torch_error<c10::Error>("Triton Error [CUDA]: out of memory"), device_memory, cuda,
       std::nullopt},
      {"cuBLAS",
       torch_error<c10::Error>(
           "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
       library_workspace, cuda, std::nullopt},
      {"cuSOLVER",
       torch_error<c10::Error>(
           "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(h)`"),
       library_workspace, cuda, std::nullopt},
      {"cuSPARSE",
       torch_error<c10::Error>("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `create`"),
       library_workspace, cuda, std::nullopt},
      {"cuRAND", torch_error<c10::Error>("CURAND_STATUS_ALLOCATION_FAILED"), library_workspace,
       cuda, std::nullopt},
      {"cuFFT", torch_error<c10::Error>("cuFFT error: CUFFT_ALLOC_FAILED"), library_workspace, cuda,
       std::nullopt},
      {"hipBLAS",
       torch_error<c10::Error>("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `create`"),
       library_workspace, cuda, std::nullopt},
      {"cuDNN not supported", torch_error<c10::Error>(kCudnnText), library_workspace, cuda,
       std::nullopt},
      {"cuDNN 8", torch_error<c10::Error>("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
       library_workspace, cuda, std::nullopt},
      {"cuDNN 9",
       torch_error<c10::Error>("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
       library_workspace, cuda, std::nullopt},
      {"cuDNN frontend",
       torch_error<c10::Error>("GET was unable to find an engine to execute this computation"),
       library_workspace, cuda, std::nullopt},
      {"cuDNN search",
       torch_error<c10::Error>("FIND was unable to find an engine to execute this computation"),
       library_workspace, cuda, std::nullopt},
      {"cuDNN algorithm",
       torch_error<c10::Error>("Unable to find a valid cuDNN algorithm to run convolution"),
       library_workspace, cuda, std::nullopt},
      {"NCCL",
       torch_error<c10::DistBackendError>("NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled "
                                          "cuda error (run with NCCL_DEBUG=INFO for details), "
                                          "NCCL version 2.26.2\nncclUnhandledCudaError: Call to "
                                          "CUDA function failed.\nLast error:\n"
                                          "Cuda failure 2 'out of memory'"),
       device_memory, cuda, std::nullopt},
      {"NCCL before 2.24",
       torch_error<c10::DistBackendError>("Last error:\nCuda failure 'out of memory'"),
       device_memory, cuda, std::nullopt},
      {"MPS",
       torch_error<c10::Error>(
           "MPS backend out of memory (MPS allocated: 17.15 GB, other allocations: 896.00 KB, max "
           "allowed: 18.13 GB). Tried to allocate 768.00 MB on private pool."),
       device_memory, mps, 768LL << 20},
      {"MPS buffer", torch_error<c10::Error>("Invalid buffer size: 12.00 GiB"), device_memory, mps,
       12 * kGibibyte},
      {"CPU allocator on Linux",
       torch_error<c10::Error>(
           "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate "
           "memory: you tried to allocate 40000000000000 bytes. Error code 12 (Cannot allocate "
           "memory)"),
       host_memory, cpu, 40'000'000'000'000},
      {"CPU allocator on Windows",
       torch_error<c10::Error>(
           "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you "
           "tried to allocate 1073741824 bytes."),
       host_memory, cpu, kGibibyte},
      {"brim's budget in another process, whose figures are rounded in the text",
       torch_error<c10::OutOfMemoryError>(
           "CPU out of memory. Tried to allocate 1.00 KiB (1025 bytes) with 5 B (5 "
           "bytes) in use of 6 B (6 bytes) allowed by the budget"),
       host_memory, cpu, 1024},
      {"NVML does not answer",
       torch_error<c10::Error>("NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT "
                               "FAILED at \"/pytorch/c10/cuda/CUDACachingAllocator.cpp\":963"),
       device_memory, cuda, std::nullopt},
      {"CUDA driver under WSL", torch_error<c10::Error>("CUDA driver error: device not ready"),
       device_memory, cuda, std::nullopt},
      {"mmap of shared memory",
       torch_error<c10::Error>("unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate "
                               "memory (12)"),
       host_memory, cpu, 4096},
      {"the system",
       std::make_exception_ptr(std::system_error(ENOMEM, std::generic_category(), "mmap")),
       host_memory, cpu, std::nullopt},
      {"a shape beyond 2^63 bytes",
       torch_error<c10::Error>(
           "Storage size calculation overflowed with sizes=[4611686018427387904, 4]"),
       size_limit, std::nullopt, std::nullopt},
      {"C++", std::make_exception_ptr(std::bad_alloc()), host_memory, cpu, std::nullopt},
      {"C++ array", std::make_exception_ptr(std::bad_array_new_length()), size_limit, cpu,
       std::nullopt},
      {"a kernel's index range",
       torch_error<c10::Error>(
           "nonzero is not supported for tensors with more than INT_MAX elements, See "
           "https://github.com/pytorch/pytorch/issues/51871"),
       size_limit, std::nullopt, std::nullopt},
      {"a kernel's index range, at the end",
       torch_error<c10::Error>(
           "upsample_nearest2d only supports output tensors with less than INT_MAX elements"),
       size_limit, std::nullopt, std::nullopt},
      {"a kernel's 32-bit indices",
       torch_error<c10::Error>(
           "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true"),
       size_limit, std::nullopt, std::nullopt},
      {"passed on as text by another thread's wrapper",
       std::make_exception_ptr(
           std::runtime_error("Caught OutOfMemoryError in replica 0 on device 0.\n"
                              "torch.OutOfMemoryError: " +
                              kCudaText)),
       device_memory, c10::Device(at::kCUDA, 1), 2 * kGibibyte},
  };
}

TEST(Classify, RecognisesEveryKnownFailure) {
  for (const Row& row : known_failures()) {
    SCOPED_TRACE(row.source);
    const OomCause cause = classify(row.error);
    EXPECT_EQ(cause.kind, row.kind) << to_string(cause.kind);
    EXPECT_EQ(cause.device, row.device);
    EXPECT_EQ(cause.requested, row.requested);
    EXPECT_TRUE(static_cast<bool>(cause));
    EXPECT_TRUE(is_out_of_memory(row.error));
  }
}

TEST(Classify, ReadsTheTextAloneAsWell) {
  for (const Row& row : known_failures()) {
    try {
      std::rethrow_exception(row.error);
    } catch (const c10::OutOfMemoryError&) {  // its text may be anything
    } catch (const c10::AcceleratorError&) {
    } catch (const c10::Error& error) {
      const OomCause cause = classify_message(error.what_without_backtrace());
      EXPECT_EQ(cause.kind, row.kind) << row.source;
      EXPECT_EQ(cause.device, row.device) << row.source;
    } catch (const std::exception&) {
    }
  }
}

/// Errors that mention memory, or look like one of the above, and that no smaller size would cure.
std::vector<std::exception_ptr> near_misses() {
  std::vector<std::exception_ptr> errors;
  for (const char* text : {
           "CUDA error: an illegal memory access was encountered",
           "CUDA error: misaligned address",
           "CUDA error: device-side assert triggered",
           "CUDA error: unspecified launch failure",
           "CUDA error: no kernel image is available for execution on the device",
           "CUDA error: out of memory bounds",
           "CUDA out of memory handling is disabled",
           "MY_CUDA out of memory.",
           "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, "
           "opb, m, n, k )`",
           "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`",
           "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
           "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Reason: dimension 4 is not 16 aligned",
           "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
           "cuDNN error: CUDNN_STATUS_BAD_PARAM",
           "cuFFT error: CUFFT_EXEC_FAILED",
           "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnSgesvd`",
           "CUSTOMER_ALLOCATION_FAILED: no seats left",
           "CURSOR_ALLOC_FAILED",
           "MY_CUBLAS_STATUS_ALLOC_FAILED",
           "CUBLAS_STATUS_ALLOC_FAILED_HANDLER is not set",
           "ROCKET_ALLOC_FAILED",
           "we were unable to find an engineer",
           "Unable to find a valid configuration",
           "Last error:\nCuda failure 700 'an illegal memory access was encountered'",
           "Last error:\nCuda failure 'peer access is not supported between these two devices'",
           "NCCL error: unhandled system error",
           "out of resource: shared memory, Required: 114688, Hardware limit: 101376",
           "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
           "dataloader's workers are out "
           "of shared memory. Please try to raise your shared memory limit.",
           "unable to open shared memory object </torch_1_2> in read-write mode: Too many open "
           "files (24)",
           "open file failed because of errno 2 on fopen: No such file or directory, file path: "
           "/logs/CUDA out of memory.txt",
           "PytorchStreamReader failed reading file data/CPU out of memory.pkl: file read failed",
           "the layer named 'out of memory' does not exist",
           "see https://example.com/how-to-fix-CUDA-out-of-memory",
           "Invalid buffer size: must be positive",
           "Invalid buffer size",
           "value is larger than INT_MAX",
           "INT_MAX elementwise operations are not supported",
           "value cannot be converted to type int32_t without overflow",
           "The size of tensor a (3) must match the size of tensor b (4) at non-singleton "
           "dimension 0",
           "Trying to backward through the graph a second time (or directly access saved tensors "
           "after they have "
           "already been freed)",
           "unsupported operation: more than one element of the written-to tensor refers to a "
           "single memory location",
           "not enough memory channels",
           "Tried to allocate 2.00 GiB",
           "out of memory",
           "",
       }) {
    errors.push_back(torch_error<c10::Error>(text));
    errors.push_back(std::make_exception_ptr(std::runtime_error(text)));
  }
  // The right text with a type that blames an argument or the program.
  errors.push_back(torch_error<c10::ValueError>(kCudaText));
  errors.push_back(torch_error<c10::TypeError>(kCudaText));
  errors.push_back(torch_error<c10::IndexError>(kCudaText));
  errors.push_back(torch_error<c10::NotImplementedError>(kCudaText));
  errors.push_back(std::make_exception_ptr(std::invalid_argument(kCudaText)));
  errors.push_back(std::make_exception_ptr(std::out_of_range("out of memory")));
  errors.push_back(std::make_exception_ptr(std::length_error("vector::reserve")));
  errors.push_back(std::make_exception_ptr(std::bad_optional_access()));
  errors.push_back(std::make_exception_ptr(std::bad_cast()));
  errors.push_back(
      std::make_exception_ptr(std::system_error(EAGAIN, std::generic_category(), "thread")));
  errors.push_back(std::make_exception_ptr(std::future_error(std::future_errc::broken_promise)));
  errors.push_back(runtime_api_error(700, "CUDA error: an illegal memory access was encountered"));
  errors.push_back(runtime_api_error(710, "CUDA error: device-side assert triggered"));
  errors.push_back(torch_error<c10::DistBackendError>(
      "NCCL error: remote process exited or there was a network error"));
  errors.push_back(torch_error<c10::LinAlgError>("linalg.inv: the matrix is singular"));
  errors.push_back(std::make_exception_ptr(42));
  errors.push_back(std::make_exception_ptr(std::string("CUDA out of memory.")));
  errors.emplace_back();
  return errors;
}

TEST(Classify, LetsNearMissesPass) {
  for (const std::exception_ptr& error : near_misses()) {
    const OomCause cause = classify(error);
    std::string what = "(no std::exception)";
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (const std::exception& exception) {
      what = exception.what();
    } catch (...) {
    }
    SCOPED_TRACE(what);
    EXPECT_EQ(cause.kind, OomKind::none) << to_string(cause.kind);
    EXPECT_FALSE(cause.device.has_value());
    EXPECT_FALSE(cause.requested.has_value());
    EXPECT_FALSE(is_out_of_memory(error));
  }
}

TEST(Classify, TheBacktraceOfAnErrorIsNotItsMessage) {
  const c10::Error error("assertion failed",
                         std::make_shared<c10::PrecomputedLazyValue<std::string>>(
                             "frame #0: CUDA out of memory. handler()"));
  EXPECT_CONTAINS(std::string(error.what()), "CUDA out of memory.");
  EXPECT_FALSE(is_out_of_memory(error));
}

TEST(Classify, ContextThatWasAddedOnTheWayIsPartOfTheMessage) {
  c10::Error error(kHere, "CUDA error: out of memory");
  error.add_context("while running layer 3");
  EXPECT_TRUE(is_out_of_memory(error));
}

TEST(Classify, ReadsTheBytesAskedFor) {
  const std::vector<std::pair<std::string, std::optional<std::int64_t>>> cases{
      {"CUDA out of memory. Tried to allocate 512 bytes.", 512},
      {"CUDA out of memory. Tried to allocate 20.00 KiB.", 20 << 10},
      {"CUDA out of memory. Tried to allocate 20.50 MiB (GPU 0; 8.00 GiB total capacity)",
       41 << 19},
      {"CUDA out of memory. Tried to allocate 1.25 TiB.", 5LL << 38},
      {"CUDA out of memory. Tried to allocate 2.00 PiB.", 1LL << 51},
      {"CUDA out of memory. Tried to allocate lots.", std::nullopt},
      {"CUDA out of memory. Tried to allocate 5", std::nullopt},
      {"CUDA out of memory. Tried to allocate 5 parsecs.", std::nullopt},
      {"CUDA out of memory. Tried to allocate -5 bytes.", std::nullopt},
      {"CUDA out of memory. Tried to allocate 99999999999999.00 TiB.", std::nullopt},
      {"CUDA out of memory. Tried to allocate ", std::nullopt},
      {"CUDA out of memory.", std::nullopt},
  };
  for (const auto& [text, bytes] : cases) {
    const OomCause cause = classify_message(text);
    EXPECT_TRUE(static_cast<bool>(cause)) << text;
    EXPECT_EQ(cause.requested, bytes) << text;
  }
}

TEST(Classify, ReadsTheBytesInUse) {
  EXPECT_EQ(classify_message(kCudaText).in_use, std::int64_t{75} << 30);
  EXPECT_EQ(classify_message("CUDA error: out of memory").in_use, std::nullopt);
}

/// The error of a budget that refuses `bytes`, as it was thrown on the calling thread.
std::exception_ptr refused(std::int64_t bytes) {
  try {
    tests::tensor_of(bytes);
  } catch (const c10::Error&) {
    return std::current_exception();
  }
  return nullptr;
}

TEST(Classify, OurOwnErrorsHaveExactFiguresOnAnyThread) {
  install_cpu_allocator();
  const std::int64_t before = memory_stats(at::kCPU).allocated;
  const Budget budget(before + 1000, at::kCPU);
  constexpr int kThreads = 8;
  std::vector<std::exception_ptr> errors(kThreads);
  tests::in_threads(kThreads,
                    [&](int i) { errors[static_cast<std::size_t>(i)] = refused((1 << 20) + i); });
  const auto expect_figures = [&](const OomCause& cause, int i) {
    EXPECT_EQ(cause.kind, OomKind::host_memory);
    EXPECT_EQ(cause.device, c10::Device(at::kCPU));
    EXPECT_EQ(cause.requested, (1 << 20) + i);
    EXPECT_EQ(cause.in_use, before);
  };
  for (int i = 0; i < kThreads; ++i) {
    expect_figures(classify(errors[static_cast<std::size_t>(i)]), i);
  }
  tests::in_threads(kThreads, [&](int i) {
    expect_figures(classify(errors[static_cast<std::size_t>(kThreads - 1 - i)]), kThreads - 1 - i);
  });
}

TEST(Classify, OurOwnErrorsKeepTheirFiguresWithContextAndAsText) {
  install_cpu_allocator();
  const Budget budget(1, at::kCPU);
  try {
    tests::tensor_of((1 << 20) + 5);
    FAIL() << "nothing was thrown";
  } catch (c10::Error& error) {
    EXPECT_EQ(classify_message(error.what_without_backtrace()).requested, (1 << 20) + 5);
    error.add_context("while running layer 3");
    EXPECT_EQ(classify(error).requested, (1 << 20) + 5);
  }
}

TEST(Classify, OfManyErrorsOfOurOwnTheOldestShowWhatTheirTextSays) {
  install_cpu_allocator();
  const Budget budget(1, at::kCPU);
  const std::exception_ptr old = refused((1 << 20) + 5);
  for (int i = 0; i < 1000; ++i) {
    refused((1 << 21) + i);
  }
  EXPECT_EQ(classify(old).requested, 1 << 20) << "1.00 MiB, rounded";
  EXPECT_EQ(classify(refused((1 << 21) + 7)).requested, (1 << 21) + 7);
}

TEST(Classify, ReadsTheDeviceIndex) {
  const auto device = [](const std::string& text) {
    return classify_message("CUDA out of memory. " + text).device;
  };
  EXPECT_EQ(device("GPU 0 has a total capacity of 8.00 GiB"), c10::Device(at::kCUDA, 0));
  EXPECT_EQ(device("GPU 15 has a total capacity of 8.00 GiB"), c10::Device(at::kCUDA, 15));
  for (const char* text :
       {"", "GPU has a total capacity of 8.00 GiB", "GPU 999 has a total capacity of 8.00 GiB",
        "GPU -1 has a total capacity of 8.00 GiB", "GPU -2 has a total capacity",
        "GPU one has a total capacity", "It has a total capacity of 8.00 GiB"}) {
    EXPECT_EQ(device(text), c10::Device(at::kCUDA)) << text;
  }
}

TEST(Classify, AnUnknownTextHasTheKindThatTheCallerKnows) {
  EXPECT_EQ(classify_message("no idea", OomKind::device_memory).kind, OomKind::device_memory);
  const OomCause host = classify_message("Unable to allocate 8.00 GiB for an array with shape (1,)",
                                         OomKind::host_memory);
  EXPECT_EQ(host.kind, OomKind::host_memory);
  EXPECT_EQ(host.device, c10::Device(at::kCPU));
  EXPECT_EQ(host.requested, std::int64_t{8} << 30);
  EXPECT_EQ(classify_message(kCudnnText, OomKind::device_memory).kind, OomKind::library_workspace)
      << "a text that is known says more";
}

TEST(Classify, KindsHaveNames) {
  EXPECT_STREQ(to_string(OomKind::none), "not out of memory");
  EXPECT_STREQ(to_string(OomKind::device_memory), "device memory");
  EXPECT_STREQ(to_string(OomKind::host_memory), "host memory");
  EXPECT_STREQ(to_string(OomKind::library_workspace), "library workspace");
  EXPECT_STREQ(to_string(OomKind::size_limit), "size limit");
}

struct ForeignError : std::exception {};

TEST(Classify, AnAddedClassifierIsAskedFirstAndMayPass) {
  set_exception_classifier([](const std::exception& error) noexcept -> std::optional<OomCause> {
    if (dynamic_cast<const ForeignError*>(&error) == nullptr) {
      return std::nullopt;
    }
    OomCause cause;
    cause.kind = OomKind::device_memory;
    cause.requested = 5;
    return cause;
  });
  const OomCause cause = classify(ForeignError());
  const OomCause known = classify(std::bad_alloc());
  set_exception_classifier(nullptr);
  EXPECT_EQ(cause.kind, OomKind::device_memory);
  EXPECT_EQ(cause.requested, 5);
  EXPECT_EQ(known.kind, OomKind::host_memory) << "what it passes on is classified as ever";
  EXPECT_FALSE(is_out_of_memory(ForeignError()));
}

template <class Inner, class Outer>
std::exception_ptr nested(const Inner& inner, const Outer& outer) {
  try {
    try {
      throw inner;
    } catch (...) {
      std::throw_with_nested(outer);
    }
  } catch (...) {
    return std::current_exception();
  }
}

TEST(OutOfMemory, WhatIsNestedInARuntimeErrorCounts) {
  const std::runtime_error step("the step failed");
  EXPECT_EQ(classify(nested(std::bad_alloc(), step)).kind, OomKind::host_memory);
  const c10::Error room({__func__, __FILE__, 1}, "CUDA out of memory. Tried to allocate 2.00 GiB");
  EXPECT_EQ(classify(nested(room, step)).requested, std::int64_t{2} << 30);
  EXPECT_FALSE(is_out_of_memory(nested(std::runtime_error("a bad row"), step)));
  EXPECT_FALSE(is_out_of_memory(nested(room, std::logic_error("a bug"))));
}

}  // namespace
}  // namespace brim
