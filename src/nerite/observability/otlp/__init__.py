"""Traces to OpenTelemetry's collectors, by OTLP over HTTP."""
