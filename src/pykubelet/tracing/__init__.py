"""OpenTelemetry tracing: spans, sampling, propagation, and their export by OTLP.

- `span.py`: spans, the current span of a task, `Tracer` with its sampling, and the W3C header `traceparent`.
- `otlp.py`: encoding of spans, and the addresses of collectors.
- `exporter.py`: bounded queue, batches, retries.

Only `span.py` is imported when tracing is off. There is no dependency on the OpenTelemetry SDK: see
`docs/tracing.md` for the measurements.
"""
