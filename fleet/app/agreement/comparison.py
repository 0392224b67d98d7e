"""Agreement test: checks that production code and the simulator make the same decisions for one scenario, line by line.

`simulated` runs a scenario's plan as `fleet.sim.run.simulate` does. `served` runs it through the servers of production
in virtual time (`fleet.app.agreement.production_world`). Both return a log of decisions (`fleet.sim.decision_log`). The
two logs must be equal, including the instants in nanoseconds.

What the test shows, and what it does not:

1. Both runs use the same router machine. Equal logs show that both runs give this machine the same events, in the same
   order and at the same instants, and that the commands of the machine have the same effects.
2. Both runs use the simulator's engines. Whether their step times are right is another question (`fleet hardware
   accuracy`). These engines report tokens block by block. If they reported each token, the log would mainly contain
   lines about reservations that have grown by one token.
3. Every message takes the same one-way delay in both runs, and computing takes no time. In production computing takes time, too:
   the router needs some ten microseconds for a request.
4. Two events at the same instant on different workers have no defined order. If two workers end a step at the same
   instant, the logs may differ, and both are right. The kernel's seed shuffles such events in both runs. Scenarios
   avoid them by arrival and step times that do not coincide. The events of one worker are always in order.
5. If a worker's network is cut for longer than the heartbeat timeout, the simulated router drops the worker after
   exactly the timeout. In production it takes up to a quarter of the timeout longer, because the router counts silence in
   slices of that length. So the logs agree only for shorter cuts.
6. Workers send load reports to routers in production only. Decisions depend on them only where LoRA adapters are loaded.
"""

from collections.abc import Callable, Sequence
from random import Random

from msgspec import Struct

from fleet.app.agreement.production_world import JOIN_TIME, ProductionWorld, keys_from_tokens
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.router.machine import RouterMachine
from fleet.router.observer import ObservedMachine
from fleet.sim.decision_log import DecisionLog
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import EndedRequest
from fleet.sim.run import RunPlan, world_arguments
from fleet.sim.workload.clients import Traffic, start_clients
from fleet.sim.world import World

LOOK_EVERY = 100 * MILLISECOND
PATIENCE = 600 * SECOND  # a run fails if requests are live, and none has ended for this virtual time


class RequestStuck(ConfigurationRefused):
    """A run of the agreement test hangs: it has live requests, and no request has ended for `PATIENCE`."""


class LoggedRun(Struct, frozen=True):
    """Result of a run: its decision log, and the requests in the order of their ends."""

    lines: Sequence[str]
    ended: Sequence[EndedRequest]


def simulated(plan: RunPlan, traffic: Traffic) -> LoggedRun:
    """Run a plan in the simulator, and return the router's decisions and the ended requests.

    Raises:
        RequestStuck: No request has ended for `PATIENCE`, although some are live.
    """
    kernel, log, ended = Kernel(plan.seed), DecisionLog(), list[EndedRequest]()
    world = World(kernel, plan.pools, plan.router, record=log, ended=ended.append, **world_arguments(plan))
    log.machine = world.machine
    _drive(kernel, world, plan, traffic, ended.append, over=lambda: None)
    return LoggedRun(log.lines, ended)


def served(plan: RunPlan, traffic: Traffic) -> LoggedRun:
    """Run a plan through production's servers in virtual time, and return the router's decisions and the ended requests.

    Raises:
        RequestStuck: No request has ended for `PATIENCE`, although some are live.
    """
    log = DecisionLog()
    log.machine = ObservedMachine(plan.router, Random(plan.seed), plan.policy, keys_from_tokens, observer=log)
    ended = serve(plan, traffic, log.machine)
    return LoggedRun(log.lines, ended)


def serve(plan: RunPlan, traffic: Traffic, machine: RouterMachine) -> list[EndedRequest]:
    """Run a plan through production's servers; return the requests in the order of their ends.

    The argument `machine` must have the plan's seed and policy, and the hasher `keys_from_tokens`.

    Raises:
        RequestStuck: No request has ended for `PATIENCE`, although some are live.
    """
    kernel, ended = Kernel(plan.seed, begin=-JOIN_TIME), list[EndedRequest]()
    world = ProductionWorld(
        kernel, plan.pools, plan.router, machine=machine, ended=ended.append, **world_arguments(plan)
    )
    try:
        kernel.run(until=Nanos(-1))
        kernel.skip(Nanos(0))
        _drive(kernel, world, plan, traffic, ended.append, over=world.close)
    except BaseException:  # any exception, even Ctrl-C: no task may outlive the run
        world.abandon()
        raise
    return ended


def _drive(
    kernel: Kernel,
    world: World,
    plan: RunPlan,
    traffic: Traffic,
    ended: Callable[[EndedRequest], None],
    *,
    over: Callable[[], None],
) -> None:
    """Run a plan in a world until its last request has ended. Then call `over`, and run the remaining events."""
    for fault in plan.faults:
        world.fail(fault)
    clients = start_clients(plan.clients, kernel, world, traffic, ended)

    def look() -> None:
        if clients.over:
            over()
        elif world.live and kernel.now() - max(world.last_end, 0) > PATIENCE:
            raise RequestStuck(
                f"{world.live} requests are not over at {kernel.now() / SECOND:.3f} s, and none has ended for {PATIENCE // SECOND} s"
            )
        else:
            kernel.after(LOOK_EVERY, look)

    look()
    kernel.run()
    world.check()


def first_difference(some: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the index of the first line in which two logs differ; None if the logs are equal.

    If the shorter log is equal to the beginning of the longer one, return the number of lines of the shorter log.
    """
    for number, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return number
    return None if len(some) == len(others) else min(len(some), len(others))
