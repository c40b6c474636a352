"""Programs that measure: benchmarks of step times and the calibration of the cost model."""
