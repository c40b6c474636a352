"""Programs that measure: benchmarks of step times, and advice for a job."""
