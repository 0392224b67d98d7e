"""Two measurements of the time to the first token: after an installation, and on a vLLM engine whose prefills were cancelled.

    python -m loadtests.first_token [--json]
    python -m loadtests.first_token --cancelled [--rounds N] [--step-tokens N ...] [--starts N] [--json]

The first one tests an installation. The checkout is installed into an empty environment by `pip install`, only with its declared
dependencies. Then, with an empty home folder, one command starts a whole cluster with the simulated engine and sends a request. The
program ends with status 1 if the first token takes longer than a minute.

With `--cancelled`, a vLLM engine gets long prompts. When its first step with these prompts has begun, their requests are cancelled, and
a new request is sent. This is the worst moment: a step cannot be interrupted, so the new request waits for a whole step. The new
request's time to the first token is compared with the time on an idle engine, which each round measures, too. As a check, each round
also measures the new request without the cancellation. `--step-tokens` limits the tokens of a step. With several values, engines with
these limits are started in turn, `--starts` times each. Three more figures show what a limit costs and gains: the time to the first
token of one long prompt, the rate at which several long prompts are computed, and the time per token of an answer while long prompts
are computed. The program ends with status 1 if the median after a cancellation is more than 1.2 times that of the idle engine, with
any of the limits.
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
from collections.abc import Callable, Coroutine
from functools import partial
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
OTHERS = 4  # number of long prompts sent at once; the engine computes the first one while the others wait
WARM_UP_ROUNDS = 2
CASES = ("idle", "cancelled", "not_cancelled")
BESIDE = 2  # long prompts that are computed while an answer is generated
ANSWER_TOKENS = 500  # so many that the answer does not end while the `BESIDE` prompts are computed


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.first_token", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--cancelled", action="store_true", help="measure vLLM after cancelled prefills")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of --cancelled with one engine")
    parser.add_argument(
        "--step-tokens",
        type=int,
        nargs="+",
        default=[None],
        help="most tokens of a step with --cancelled, one or several; the worker's default if left out",
    )
    parser.add_argument("--starts", type=int, default=1, help="engines with each limit of --step-tokens, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.cancelled:
        return _cancelled(arguments.rounds, arguments.step_tokens, arguments.starts, arguments.json)
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


def _cancelled(rounds: int, limits: list[int | None], starts: int, as_json: bool) -> int:
    measured: dict[int | None, dict[str, list[float]]] = {
        limit: {name: [] for name in MEASUREMENTS} for limit in limits
    }
    with tempfile.TemporaryDirectory(prefix="first-token-") as name:
        for start in range(starts):
            for limit in limits if start % 2 else reversed(limits):
                _measure(Path(name), limit, rounds, measured[limit])
    ratios = {limit: _ratios(found) for limit, found in measured.items()}
    if as_json:
        run_facts = {"vllm": version(), "rounds": rounds, "starts": starts, "load": round(os.getloadavg()[0], 1)}
        of_limits = [
            {"step_tokens": limit, "quartiles": quartiles(found), "ratios": ratios[limit]}
            for limit, found in measured.items()
        ]
        print(json.dumps({**run_facts, "limits": of_limits}))
    else:
        for limit, found in measured.items():
            print(f"steps of {'the default number of' if limit is None else limit} tokens:")
            for name, (low, middle, high) in quartiles(found).items():
                ratio = f"; {ratios[limit][name]} times idle" if name in ratios[limit] else ""
                print(f"  {name}: {middle} {MEASUREMENTS[name][1]} (quartiles {low} and {high}{ratio})")
    return 0 if all(each["cancelled"] <= MOST_RATIO for each in ratios.values()) else 1


def _measure(folder: Path, limit: int | None, rounds: int, measured: dict[str, list[float]]) -> None:
    """Start an engine, run `rounds` rounds after the warm-up, and append each result to its list in `measured`."""
    with hosted(_worker(folder, {} if limit is None else {"max_num_batched_tokens": limit})) as engines:
        for number in range(WARM_UP_ROUNDS + rounds):
            for name in MEASUREMENTS if number % 2 else reversed(MEASUREMENTS):
                measurement, _ = MEASUREMENTS[name]
                found = engines.run(measurement(engines.engines[0]))
                if number >= WARM_UP_ROUNDS:
                    measured[name].append(found)


def _ratios(measured: dict[str, list[float]]) -> dict[str, float]:
    idle = statistics.median(measured["idle"])
    return {case: round(statistics.median(measured[case]) / idle, 3) for case in CASES[1:]}


def quartiles(measured: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the three quartiles of each measurement. If it has a single value, all three are this value."""
    several = {name: found if len(found) > 1 else 2 * found for name, found in measured.items()}
    return {name: [round(each, 1) for each in statistics.quantiles(found)] for name, found in several.items()}


def _worker(folder: Path, engine_arguments: dict[str, int]) -> WorkerSettings:
    settings = vllm_worker(build_tiny_model(folder))
    return structs.replace(settings, vllm=structs.replace(settings.vllm, extra_args=engine_arguments))


async def _follow_up(driver: EngineDriver, case: str) -> float:
    """Return the milliseconds to the first token of a request. `case` says what the engine does when the request arrives."""
    engine = driver.engine
    if case != "idle":
        others = [an_attempt(fresh_prompt(LONG_TOKENS), 1) for _ in range(OTHERS)]
        (before,) = engine.pulses()
        driver.submit(*others)
        await until(lambda: engine.pulses()[0].steps > before.steps, between_seconds=0.001)
        if case == "cancelled":
            for each in others:
                engine.cancel(each.request_id)
    return await _first_token_ms(driver, FOLLOW_UP_TOKENS)


async def _first_token_ms(driver: EngineDriver, tokens: int) -> float:
    start = an_attempt(fresh_prompt(tokens), 1)
    began = time.perf_counter()
    await driver.do(start)
    elapsed = time.perf_counter() - began
    await driver.idle()
    return 1e3 * elapsed


async def _prefill_rate(driver: EngineDriver) -> float:
    """Return the prompt tokens per second of several long prompts that are sent at once."""
    return OTHERS * LONG_TOKENS / await _long_prompts(driver, OTHERS)


async def _beside_prefills(driver: EngineDriver) -> float:
    """Return the milliseconds per token of an answer while the engine computes long prompts."""
    answer = an_attempt(fresh_prompt(1), ANSWER_TOKENS)
    driver.submit(answer)
    await driver.until(lambda: driver.tokens[answer.request_id])
    before = len(driver.tokens[answer.request_id])
    elapsed = await _long_prompts(driver, BESIDE)
    tokens = len(driver.tokens[answer.request_id]) - before
    driver.engine.cancel(answer.request_id)
    await driver.idle()
    return 1e3 * elapsed / tokens


async def _long_prompts(driver: EngineDriver, number: int) -> float:
    """Send `number` long prompts at once, and return the seconds until all of them have been computed."""
    starts = [an_attempt(fresh_prompt(LONG_TOKENS), 1) for _ in range(number)]
    began = time.perf_counter()
    driver.submit(*starts)
    for each in starts:
        await driver.end_of(each)
    return time.perf_counter() - began


Measurement = Callable[[EngineDriver], Coroutine[None, None, float]]

MEASUREMENTS: dict[str, tuple[Measurement, str]] = {
    **{case: (partial(_follow_up, case=case), "ms to the first token") for case in CASES},
    "one_long": (partial(_first_token_ms, tokens=LONG_TOKENS), f"ms to the first token of {LONG_TOKENS}"),
    "prefill": (_prefill_rate, f"tokens/s of {OTHERS} prompts of {LONG_TOKENS}"),
    "beside_prefills": (_beside_prefills, f"ms per token of an answer beside {BESIDE} prompts of {LONG_TOKENS}"),
}
"""The measurements of a round, by name: a function, and the unit of what it returns."""


def _installed(folder: Path) -> Path:
    """Install the checkout and return the command `fleet` of the new environment."""
    environment, source = folder / "venv", folder / "source"
    shutil.copytree(CHECKOUT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))  # a build writes into its source
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
    """Return the environment variables, without those by which a child process could find this Python installation."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
    }
    return kept | {"PATH": os.defpath}


if __name__ == "__main__":
    sys.exit(main())
