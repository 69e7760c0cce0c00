// Fine-tuning the head of a frozen network whose input needs a gradient: the layers between keep
// only what backward needs. Prints what torch::nn keeps and what brim keeps, layer by layer.
#include <brim/brim.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <iostream>

namespace {

torch::nn::Sequential network() {
  torch::nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(i == 0 ? 3 : 16, 16, 3).padding(1)));
    model->push_back(torch::nn::BatchNorm2d(16));
    model->push_back(torch::nn::ReLU());
  }
  model->push_back(torch::nn::AdaptiveAvgPool2d(1));
  model->push_back(torch::nn::Flatten());
  return model;
}

/// One step; returns the bytes that were held for backward.
long long step(torch::nn::Sequential& body, torch::nn::Linear& head, at::Tensor& prompt,
               torch::optim::SGD& optimizer) {
  const at::Tensor images = at::rand({8, 3, 64, 64});
  const brim::PeakMeter meter(at::kCPU);
  const at::Tensor loss = head->forward(body->forward(images + prompt)).pow(2).mean();
  const long long kept = meter.left();
  optimizer.zero_grad();
  loss.backward();
  optimizer.step();
  return kept;
}

}  // namespace

int main() {
  brim::install_cpu_allocator();
  torch::nn::Sequential body = network();
  torch::nn::Linear head(16, 10);
  at::Tensor prompt = at::zeros({3, 64, 64}).requires_grad_();  // learned, added to every image
  body->eval();
  for (at::Tensor& parameter : body->parameters()) {
    parameter.set_requires_grad(false);
  }
  torch::optim::SGD optimizer({prompt, head->weight, head->bias}, 0.1);

  const at::Tensor images = at::rand({8, 3, 64, 64});
  std::cout << brim::nn::audit(*body, [&] { return body->forward(images + prompt); });
  std::printf("torch::nn keeps %lld KiB\n", step(body, head, prompt, optimizer) / 1024);
  std::cout << brim::nn::convert(*body);
  std::printf("brim::nn keeps %lld KiB\n", step(body, head, prompt, optimizer) / 1024);
  return 0;
}
