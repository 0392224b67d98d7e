"""Two measurements of the time to the first token, without any service.

    python -m loadtests.first_token [--json]
    python -m loadtests.first_token --cancelled [--rounds N] [--step-tokens N] [--json]

The first one tests an installation. The checkout is installed into an empty environment by `pip install`, only with its declared
dependencies. Then, with an empty home folder, one command starts a whole cluster with the simulated engine and sends a request. The
program ends with status 1 if the first token takes longer than a minute.

With `--cancelled`, a vLLM engine gets long prompts, and when its first step with them has begun, their requests are cancelled. The time
to the first token of a request that is sent in the same moment is compared with the time on an idle engine, in turn. This is the worst
moment: a step cannot be interrupted, so the request waits for a whole one. `--step-tokens` limits the prompt tokens of a step. As a check
of the measurement, it is also taken without the cancellation. The program ends with status 1 if the median after a cancellation is more
than 1.2 times that of the idle engine.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec import structs

from fleet.local.tiny_model import build_tiny_model
from tests.support.waiting import until
from tests.support.workers.engine_driver import EngineDriver, an_attempt, fresh_prompt
from tests.support.workers.vllm_engines import hosted, vllm_worker
from workers.engines.vllm.launch import version
from workers.settings import WorkerSettings

CHECKOUT = Path(__file__).parent.parent
NOT_SOURCE = (".*", "build", "tests", "loadtests", "__pycache__", "*.egg-info", "*.so")
MOST_SECONDS = 60.0
INSTALL_SECONDS = 1800.0
PROMPT = "Hello"

MOST_RATIO = 1.2
LONG_TOKENS, FOLLOW_UP_TOKENS = 4000, 2048
OTHERS = 4  # long prompts at once; the engine computes the first of them, and the others wait
WARM_UP_ROUNDS = 3
CASES = ("idle", "cancelled", "not_cancelled")


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.first_token", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--cancelled", action="store_true", help="measure vLLM after cancelled prefills")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of --cancelled")
    parser.add_argument(
        "--step-tokens", type=int, help="prompt tokens of a step with --cancelled; vLLM's default if left out"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.cancelled:
        return _cancelled(arguments.rounds, arguments.step_tokens, arguments.json)
    return _installation(arguments.json)


def _installation(as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="first-token-") as name:
        folder = Path(name)
        began = time.monotonic()
        fleet = _installed(folder)
        installed = time.monotonic()
        first_token = _first_token(fleet, folder)
    found = {"install_seconds": round(installed - began, 1), "first_token_seconds": round(first_token, 2)}
    if as_json:
        print(json.dumps(found))
    else:
        print(
            f"installed in {found['install_seconds']} s; first token {found['first_token_seconds']} s after the command"
        )
    return 0 if first_token <= MOST_SECONDS else 1


def _cancelled(rounds: int, step_tokens: int | None, as_json: bool) -> int:
    limit = {} if step_tokens is None else {"max_num_batched_tokens": step_tokens}
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    with (
        tempfile.TemporaryDirectory(prefix="first-token-") as name,
        hosted(_worker(Path(name), limit)) as engines,
    ):
        for number in range(WARM_UP_ROUNDS + rounds):
            for case in CASES if number % 2 else reversed(CASES):
                found = engines.run(_follow_up(engines.engines[0], case))
                if number >= WARM_UP_ROUNDS:
                    seconds[case].append(found)
    medians = {case: statistics.median(found) for case, found in seconds.items()}
    ratios = {case: round(medians[case] / medians["idle"], 3) for case in CASES[1:]}
    quartiles = {
        case: [round(1e3 * each, 1) for each in statistics.quantiles(found)] for case, found in seconds.items()
    }
    if as_json:
        told = {"vllm": version(), "rounds": rounds, "step_tokens": step_tokens, "load": round(os.getloadavg()[0], 1)}
        print(json.dumps({**told, "quartiles_ms": quartiles, "ratios": ratios}))
    else:
        for case, (low, middle, high) in quartiles.items():
            ratio = f"; {ratios[case]} times idle" if case in ratios else ""
            print(f"{case}: first token after {middle} ms (quartiles {low} to {high} ms{ratio})")
    return 0 if ratios["cancelled"] <= MOST_RATIO else 1


def _worker(folder: Path, engine_arguments: dict[str, int]) -> WorkerSettings:
    settings = vllm_worker(build_tiny_model(folder))
    return structs.replace(settings, vllm=structs.replace(settings.vllm, extra_args=engine_arguments))


async def _follow_up(driver: EngineDriver, case: str) -> float:
    """Return the seconds to the first token of a request that is sent to an idle engine, or after others."""
    engine = driver.engine
    if case != "idle":
        others = [an_attempt(fresh_prompt(LONG_TOKENS), 1) for _ in range(OTHERS)]
        (before,) = engine.pulses()
        driver.submit(*others)
        await until(lambda: engine.pulses()[0].steps > before.steps, between_seconds=0.001)
        if case == "cancelled":
            for each in others:
                engine.cancel(each.request_id)
    start = an_attempt(fresh_prompt(FOLLOW_UP_TOKENS), 1)
    began = time.perf_counter()
    await driver.do(start)
    elapsed = time.perf_counter() - began
    await driver.idle()
    return elapsed


def _installed(folder: Path) -> Path:
    """Install the checkout and return the command `fleet` of the new environment."""
    environment, source = folder / "venv", folder / "source"
    shutil.copytree(CHECKOUT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))  # a build leaves files behind
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(environment)], [*pip, str(source)]):
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_SECONDS, env=_environment(), stdout=sys.stderr)
    return environment / "bin" / "fleet"


def _first_token(fleet: Path, folder: Path) -> float:
    """Return the seconds from the command to the first character of an answer."""
    home = folder / "home"
    home.mkdir()
    ports = ("--http-port", "0", "--grpc-port", "0")
    began = time.monotonic()
    cluster = subprocess.Popen(
        [str(fleet), "up", "--engine", "simulated", *ports, "--demo", PROMPT],
        cwd=home,
        env=_environment() | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        for line in cluster.stdout:
            if line == f"> {PROMPT}\n":
                break
        if not cluster.stdout.read(1):
            raise RuntimeError("the cluster ended without an answer; what it said is above")
        return time.monotonic() - began
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.wait(60)


def _environment() -> dict[str, str]:
    """Return the environment without variables that would give access to this installation."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    return kept | {"PATH": os.defpath}


if __name__ == "__main__":
    sys.exit(main())
