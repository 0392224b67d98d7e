"""Whether production and simulation decide alike: one scenario through both, and their decision logs line by line.

`simulated` runs a plan as `fleet.sim.run.simulate` does. `served` runs it through the servers of production on a virtual loop
(`fleet.app.agreement.production_world`). Both give the log of `fleet.sim.decision_log`, and the two are equal, instants to the nanosecond and all.

What that shows, and what it does not:

1. The machine is the same in both, so a log says whether the world around it is: that a simulation's router hears what a router
   hears in production, in the same order and at the same instants, and that what it says comes about as it does there.
2. Engines are the simulation's in both. How long a step takes on a GPU is not a question of agreement but of accuracy
   (`fleet hardware accuracy`); and an engine that tells each token alone would fill the log with growing bookings.
3. The wire takes the same time for everything, one way, in both. In production everything else takes time too: some ten
   microseconds of the router's for a request. On the virtual loop, as in the simulation, computing takes none.
4. What happens at one and the same instant in different places has no order. A log may say so (two workers end a step at once),
   and then two runs may differ without either being wrong; the kernel's seed shuffles such ties in both. Scenarios whose
   arrivals and step times are of no common measure have none. What one worker says is in order, always.
5. A worker that is cut off for longer than settings allow is given up after exactly that silence in the simulation, and after up to a
   quarter more in production, which counts silence in slices; here, a message later. So logs agree over shorter cuts, and not beyond
   longer ones.
6. Loads that workers report reach routers in production alone. No decision depends on them but where adapters are loaded.
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
from fleet.sim.workload.clients import Traffic, begin
from fleet.sim.world import World

LOOK_EVERY = 100 * MILLISECOND
PATIENCE = 600 * SECOND  # between two ends of requests


class RequestStuck(ConfigurationRefused):
    """A request is never over, or takes longer than can be waited for."""


class LoggedRun(Struct, frozen=True):
    """What came of a run."""

    lines: Sequence[str]
    ended: Sequence[EndedRequest]


def simulated(plan: RunPlan, traffic: Traffic) -> LoggedRun:
    """The decisions of a simulation."""
    kernel, log, ended = Kernel(plan.seed), DecisionLog(), list[EndedRequest]()
    world = World(kernel, plan.pools, plan.router, record=log, ended=ended.append, **world_arguments(plan))
    log.machine = world.machine
    _drive(kernel, world, plan, traffic, ended.append, over=lambda: None)
    return LoggedRun(log.lines, ended)


def served(plan: RunPlan, traffic: Traffic) -> LoggedRun:
    """The decisions of production's servers, in virtual time."""
    log = DecisionLog()
    log.machine = ObservedMachine(plan.router, Random(plan.seed), plan.policy, keys_from_tokens, observer=log)
    ended = serve(plan, traffic, log.machine)
    return LoggedRun(log.lines, ended)


def serve(plan: RunPlan, traffic: Traffic, machine: RouterMachine) -> list[EndedRequest]:
    """Run a plan through production's servers.

    Args:
        plan: What happens.
        traffic: What clients send.
        machine: Of the router, made with the hasher `keys_from_tokens`, and seed and policy of the plan.

    Raises:
        Stuck: A request is never over.
    """
    kernel, ended = Kernel(plan.seed, begin=-JOIN_TIME), list[EndedRequest]()
    world = ProductionWorld(
        kernel, plan.pools, plan.router, machine=machine, ended=ended.append, **world_arguments(plan)
    )
    try:
        kernel.run(until=Nanos(-1))
        kernel.skip(Nanos(0))
        _drive(kernel, world, plan, traffic, ended.append, over=world.close)
    except BaseException:  # whatever it is, Ctrl-C included: tasks must not outlive it
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
    """Let a plan happen to the end of the last request."""
    for fault in plan.faults:
        world.fail(fault)
    clients = begin(plan.clients, kernel, world, traffic, ended)

    def look() -> None:
        if clients.over:
            over()
        elif world.live and kernel.now() - max(world.last_end, 0) > PATIENCE:
            raise RequestStuck(
                f"{world.live} requests are not over at {kernel.now() / SECOND:.3f} s, and none has been for {PATIENCE // SECOND} s"
            )
        else:
            kernel.after(LOOK_EVERY, look)

    look()
    kernel.run()
    world.check()


def first_difference(some: Sequence[str], others: Sequence[str]) -> int | None:
    """The first line in which two logs differ, from 0 on; None: in none."""
    for number, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return number
    return None if len(some) == len(others) else min(len(some), len(others))
