"""Metrics of latency predictions: how well the profiles of workers match their measured times.

An error in a prediction is logged and ends these metrics. The router goes on serving.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.core import Metric

from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import longest_prefix
from fleet.core.work import WorkerDescription
from fleet.hardware.gpus import gpu
from fleet.hardware.latency.coefficients import estimate
from fleet.hardware.model_configs import read_model_config
from fleet.hardware.sharding import ShardingDegrees, shard_model
from fleet.router.latency_predictions import LatencyPredictions, WorkerProfile
from fleet.router.messages import Command, RouterEvent
from fleet.router.settings.router import ProfileSettings
from kvstore.metric_definitions import CounterDefinition, GaugeDefinition, MetricDefinition

log = logging.getLogger(__name__)

_LABELS = ("model", "role", "worker", "of")
PREDICTION_GAUGES: Mapping[str, GaugeDefinition] = GaugeDefinition.by_field(
    "fleet_prediction_",
    _LABELS,
    (
        ("error", "Median relative error of predictions with the worker's correction", "share of the measured time"),
        ("close", "Share of predictions within 20 % of the measured time", "share from 0 to 1"),
        ("profile_error", "Median relative error of the profile without correction", "share of the measured time"),
        (
            "profile_close",
            "Share of predictions of the profile alone within 20 % of the measured time",
            "share from 0 to 1",
        ),
        ("factor", "Learned factor between measured and predicted times", ""),
        ("added_ms", "Learned additional milliseconds", ""),
    ),
)
"""Maps names of fields of `PredictionAccuracy` to the gauges that show these fields."""

MADE = CounterDefinition(
    "fleet_predictions", "Predictions that were compared with a measured time", _LABELS, "predictions"
)
DRIFTS = CounterDefinition("fleet_worker_drifts", "Latency drift alarms", _LABELS, "alarms")
METRICS: Sequence[MetricDefinition] = (*PREDICTION_GAUGES.values(), MADE, DRIFTS)

ProfileLookup = Callable[[WorkerDescription], WorkerProfile | None]


class PredictionMetrics(LatencyPredictions):
    def __init__(self, profile_of: ProfileLookup):
        super().__init__(profile_of)
        self._over = False

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        if self._over:
            return
        try:
            super().__call__(now, event, commands)
        except Exception:  # supervisor: an error in a prediction fails no request; it ends the predictions
            log.exception("predictions stopped", extra={"event": type(event).__name__})
            self._over = True

    def collect(self) -> Iterator[Metric]:
        expected = [] if self._over else self.expected()
        by_labels = {(each.model, each.role, each.worker_id, each.kind): each for each in expected}
        for name, definition in PREDICTION_GAUGES.items():
            yield definition.samples({labels: getattr(each, name) for labels, each in by_labels.items()})
        yield MADE.samples({labels: each.predictions for labels, each in by_labels.items()})
        yield DRIFTS.samples({labels: each.alarms for labels, each in by_labels.items()})


def profile_lookup(profiles: Mapping[str, ProfileSettings]) -> ProfileLookup:
    """Return a function that finds a worker's profile: the one whose name is the longest prefix of the worker's id.

    The function returns None if no name is a prefix of the id.

    Raises:
        ConfigurationRefused: A model, a GPU or a sharding is invalid; the message names the profile and the field.
    """
    known = {name: _profile(f"profiles.{name}", settings) for name, settings in profiles.items()}

    def profile_of(worker: WorkerDescription) -> WorkerProfile | None:
        name = longest_prefix(worker.worker_id, known)
        return None if name is None else known[name]

    return profile_of


def _profile(where: str, settings: ProfileSettings) -> WorkerProfile:
    try:
        model = read_model_config(Path(settings.model))
        device = gpu(settings.gpu, "gpu")
        placement = shard_model(
            model, device, ShardingDegrees(tp=settings.tp, pp=settings.pp, dp=settings.dp, ep=settings.ep)
        )
        return WorkerProfile(steps=estimate(placement, settings.backend).step, step_tokens=settings.step_tokens)
    except ConfigurationRefused as error:
        raise ConfigurationRefused(f"{where}: {error}") from error
