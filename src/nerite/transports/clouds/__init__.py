"""The ports of SageMaker and Vertex AI: their paths and headers, in front of what HTTP answers."""
