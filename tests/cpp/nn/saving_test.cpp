// Regions: torch's functions are brim's in them, and nowhere else.

#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sigmoid.h>
#include <brim/nn/saving.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace {

using brim::nn::Recompute;
using brim::nn::Saving;

at::Tensor trained(at::IntArrayRef sizes) { return at::randn(sizes).set_requires_grad(true); }

bool is_brims(const at::Tensor& result) {
  return result.grad_fn() != nullptr && result.grad_fn()->name().starts_with("brim::");
}

TEST(Saving, RedirectsTorchsFunctionsUntilItsEnd) {
  const at::Tensor x = trained({3, 4});
  {
    const Saving saving;
    EXPECT_TRUE(is_brims(at::relu(x)));
    EXPECT_TRUE(is_brims(at::linear(x, trained({5, 4}))));
    EXPECT_TRUE(is_brims(at::dropout(x, 0.5, true)));
  }
  EXPECT_FALSE(is_brims(at::relu(x)));
}

TEST(Saving, ProductsAndSumsDependOnWhatIsComputedAgain) {
  const at::Tensor x = trained({3, 4});
  {
    const Saving saving;
    EXPECT_FALSE(is_brims(x * x));
    EXPECT_TRUE(is_brims(at::sigmoid(x) * x));  // tells the one that made the factor
    EXPECT_FALSE(is_brims(x + x));
  }
  const Saving saving(Recompute::cheap);
  EXPECT_TRUE(is_brims(x * x));
  EXPECT_TRUE(is_brims(x + x));
  EXPECT_FALSE(is_brims(at::add(x, x, 2)));
  EXPECT_FALSE(is_brims(x * 2));
  EXPECT_FALSE(is_brims(x + 2));
}

TEST(Saving, TheInnermostCounts) {
  const at::Tensor x = trained({3});
  const Saving outer(Recompute::cheap);
  {
    const Saving inner;
    EXPECT_FALSE(is_brims(x + x));
  }
  EXPECT_TRUE(is_brims(x + x));
}

TEST(Saving, BelongsToItsThread) {
  const Saving saving;
  bool elsewhere = true;
  std::thread([&] { elsewhere = is_brims(at::relu(trained({3}))); }).join();
  EXPECT_FALSE(elsewhere);
}

TEST(Saving, LeavesAloneWhatBrimDoesNotKnow) {
  const Saving saving(Recompute::cheap);
  const at::Tensor z = at::randn({3}, at::kComplexFloat).set_requires_grad(true);
  EXPECT_FALSE(is_brims(z * z));
  EXPECT_EQ(at::relu(at::ones({2}, at::kLong)).scalar_type(), at::kLong);
  const at::NoGradGuard no_grad;
  EXPECT_EQ(at::relu(trained({3})).grad_fn(), nullptr);
}

TEST(Saving, PutsBackAStateWhereAModuleWasLeftByAnError) {
  const at::Tensor x = trained({3});
  const Saving::State before = Saving::state();
  Saving::set_state(Saving::within(Recompute::nothing, /*of_module=*/true));
  EXPECT_TRUE(is_brims(at::relu(x)));
  Saving::leave();
  EXPECT_FALSE(is_brims(at::relu(x)));
  Saving::come_back();
  EXPECT_TRUE(is_brims(at::relu(x)));
  Saving::leave();  // and never comes back
  Saving::set_state(before);
  Saving::come_back();
  EXPECT_EQ(Saving::state(), before);
  EXPECT_FALSE(is_brims(at::relu(x)));
}

TEST(Saving, AttentionRunsAgainOnlyWhereItsWeightsAreAsLongAsAQuery) {
  const Saving saving(Recompute::cheap);
  const auto attend = [](std::int64_t length) {
    const at::Tensor x = trained({1, 2, length, 8});
    return at::scaled_dot_product_attention(x, x, x, {}, /*dropout_p=*/0.5);
  };
  EXPECT_FALSE(is_brims(attend(7)));
  EXPECT_TRUE(is_brims(attend(8)));
}

}  // namespace
