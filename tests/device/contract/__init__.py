"""What the device tier promises, the same on every device: ../npu_sim/README.md says how an NPU comes in."""
