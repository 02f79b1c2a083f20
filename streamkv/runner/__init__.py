"""The device side: StepInput in, StepOutput out. Everything here runs on the device thread."""
