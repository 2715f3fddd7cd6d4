"""Models by name: fetches a model from the Hugging Face hub, MLflow, an object store or a file, safely and once."""
