"""The layers: one file a family, as in `torch.nn.modules`."""
