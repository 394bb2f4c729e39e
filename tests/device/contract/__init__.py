"""What the device tier promises, the same on every device: README.md of ``../npu_sim`` says how an NPU gets in here."""
