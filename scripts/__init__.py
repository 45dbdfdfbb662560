"""Programs of the developer: model training, benchmarks, model pulls."""
