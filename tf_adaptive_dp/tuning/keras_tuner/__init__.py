"""A KerasTuner that pays for its search; needs the extra `tuning`."""
