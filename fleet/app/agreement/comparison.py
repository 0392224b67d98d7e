"""Agreement test: production code and the simulator must make the same decisions for one scenario, compared line by line.

`simulated` runs a plan as `fleet.sim.run.simulate` does. `served` runs it through the servers of production on a virtual loop
(`fleet.app.agreement.production_world`). Both give the log of `fleet.sim.decision_log`, and the two are equal, instants to the nanosecond and all.

What the test shows, and what it does not:

1. The machine is the same in both, so equal logs show that its surroundings are the same: the simulated router gets the same events
   as a router in production, in the same order and at the same instants, and its commands have the same effects.
2. Both use the simulated engines. How long a step takes on a GPU is a question of accuracy (`fleet hardware accuracy`), not of
   agreement; and an engine that reports each token would fill the log with growing reservations.
3. Every message takes the same one-way delay in both. In production everything else takes time, too, such as some ten microseconds of
   the router for a request. On the virtual loop, as in the simulation, computing takes no time.
4. Events of one instant in different places have no order. If two workers end a step at once, two logs may differ and both are
   right; the kernel's seed shuffles such ties in both. Scenarios without a common measure of arrival and step times have no ties.
   The events of one worker are always in order.
5. A worker whose network is cut for longer than the heartbeat timeout is given up after exactly that time in the simulation. In
   production it takes up to a quarter longer, because silence is counted in slices. So logs agree for shorter cuts only.
6. Load reports of workers reach routers in production only. Decisions depend on them only where LoRA adapters are loaded.
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
PATIENCE = 600 * SECOND  # longest virtual time in which no request ends


class RequestStuck(ConfigurationRefused):
    """A request did not end, or took too long."""


class LoggedRun(Struct, frozen=True):
    """Decision log and ended requests of a run."""

    lines: Sequence[str]
    ended: Sequence[EndedRequest]


def simulated(plan: RunPlan, traffic: Traffic) -> LoggedRun:
    """Run a plan in the simulator and return its decisions."""
    kernel, log, ended = Kernel(plan.seed), DecisionLog(), list[EndedRequest]()
    world = World(kernel, plan.pools, plan.router, record=log, ended=ended.append, **world_arguments(plan))
    log.machine = world.machine
    _drive(kernel, world, plan, traffic, ended.append, over=lambda: None)
    return LoggedRun(log.lines, ended)


def served(plan: RunPlan, traffic: Traffic) -> LoggedRun:
    """Run a plan through production's servers in virtual time and return their decisions."""
    log = DecisionLog()
    log.machine = ObservedMachine(plan.router, Random(plan.seed), plan.policy, keys_from_tokens, observer=log)
    ended = serve(plan, traffic, log.machine)
    return LoggedRun(log.lines, ended)


def serve(plan: RunPlan, traffic: Traffic, machine: RouterMachine) -> list[EndedRequest]:
    """Run a plan through production's servers; `machine` has the hasher `keys_from_tokens`, and seed and policy of the plan.

    Raises:
        RequestStuck: A request is never over.
    """
    kernel, ended = Kernel(plan.seed, begin=-JOIN_TIME), list[EndedRequest]()
    world = ProductionWorld(
        kernel, plan.pools, plan.router, machine=machine, ended=ended.append, **world_arguments(plan)
    )
    try:
        kernel.run(until=Nanos(-1))
        kernel.skip(Nanos(0))
        _drive(kernel, world, plan, traffic, ended.append, over=world.close)
    except BaseException:  # also Ctrl-C, because no task may outlive the run
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
    """Run a plan to the end of its last request."""
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
    """Return the index of the first line in which two logs differ, or None."""
    for number, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return number
    return None if len(some) == len(others) else min(len(some), len(others))
