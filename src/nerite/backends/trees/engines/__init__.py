"""What computes predictions: a model's own library, or ONNX Runtime, or treelite; on GPUs, nvForest."""
