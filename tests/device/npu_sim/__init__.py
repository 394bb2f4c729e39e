"""A stand-in for the CANN libraries under the unmodified ``torch-npu`` wheel. README.md says what it can show."""
