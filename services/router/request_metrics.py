"""What the router counts about requests: one owner for all its series, written on the request's own path.

Never waits and never fails a request.
"""

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from services.mesh.telemetry.metrics import Metrics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Series of the router. Labels are from closed sets: endpoints and outcomes, never a client's words."""

    requests: Counter
    prompt_tokens: Counter
    output_tokens: Counter
    cached_tokens: Counter
    first_token_s: Histogram
    token_gap_s: Histogram
    duration_s: Histogram
    open_requests: Gauge
    resubmitted: Counter

    @classmethod
    def registered(cls, metrics: Metrics) -> "RequestMetrics":
        """The series, registered with the process's metrics."""
        label = ("endpoint",)
        return cls(
            requests=metrics.counter(
                "flipmesh_router_requests", "Requests ended, by outcome.", ("endpoint", "outcome")
            ),
            prompt_tokens=metrics.counter("flipmesh_router_prompt_tokens", "Prompt tokens of admitted requests."),
            output_tokens=metrics.counter("flipmesh_router_output_tokens", "Tokens generated for clients."),
            cached_tokens=metrics.counter("flipmesh_router_cached_tokens", "Prompt tokens found in the prefix cache."),
            first_token_s=metrics.histogram(
                "flipmesh_router_time_to_first_token_seconds",
                "From the request's body to its first token.",
                SECONDS,
                label,
            ),
            token_gap_s=metrics.histogram(
                "flipmesh_router_inter_token_seconds", "Between outputs of one choice.", TOKEN_GAP_SECONDS
            ),
            duration_s=metrics.histogram(
                "flipmesh_router_request_duration_seconds", "From the request's body to its end.", SECONDS, label
            ),
            open_requests=metrics.gauge("flipmesh_router_open_requests", "Requests open now."),
            resubmitted=metrics.counter("flipmesh_router_resubmitted_choices", "Choices given to another generation."),
        )
