"""Fine-tuning together with the source data: features, nearest examples, joint losses, loaders."""
