"""Router processes: plans a router that runs as several processes on one machine, with the same ports for all of them."""

import secrets
import sys
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct, structs

from fleet.config import save
from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.local.processes import LocalProcess
from fleet.local.settings import SupervisionSettings
from fleet.local.supervision import ChildProcess
from fleet.local.topology import READY_WITHIN, ROUTER, STOP_WITHIN, claim_address, liveness_limits
from fleet.net.control.address import control_socket, private_folder
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.router.settings.router import RouterSettings
from kvstore.net.addresses import unix_path


class RouterProcesses(Struct, frozen=True, kw_only=True):
    """Settings files and shared addresses of a router that runs as several processes."""

    processes: tuple[LocalProcess, ...]
    http: str
    grpc: str
    control: str
    # each process's own control socket; empty: all processes share the port of `control`
    control_sockets: tuple[str, ...]
    health: str  # address of the health port; empty: there is none
    kserve: str  # address of the port for the Open Inference Protocol; empty: not served
    picker: str  # address of the endpoint picker; empty: not served


def plan_routers(settings: RouterSettings, count: int, folder: Path) -> RouterProcesses:
    """Plan `count` router processes that share ports and are peers of each other, and write their settings files.

    Args:
        settings: Settings of each process.
        count: Number of processes.
        folder: Private folder for sockets and for settings files, which may contain secrets.

    Raises:
        ConfigurationRefused: A public address is in use or invalid. Or the settings name routers outside this command as peers: these
            could not send messages to a certain one of the processes, because the processes share all addresses.
        OSError: A settings file cannot be written.
    """
    for field in ("replicas_listen", "replicas", "replicas_name"):
        if value := getattr(settings, field):
            raise ConfigurationRefused(
                f"{field}: {value if isinstance(value, str) else ', '.join(value)}: the processes of one command cannot be peers of other"
                " routers, which could not reach each of them; leave it out, or use routers of one process"
            )
    with ExitStack() as held:
        http = claim_address("http_listen", settings.http_listen, held)
        grpc = claim_address("grpc_listen", settings.grpc_listen, held)
        control = _control(settings, grpc, held)
        health = settings.health_listen and claim_address("health_listen", settings.health_listen, held)
        kserve = settings.kserve_listen and claim_address("kserve_listen", settings.kserve_listen, held)
        picker = settings.endpoint_picker and _claimed(settings.endpoint_picker, held)
    sockets = [f"unix:{folder / f'router-{number}.sock'}" for number in range(count)]
    alone = bool(unix_path(control))  # several processes cannot listen at one Unix socket
    controls = tuple(f"unix:{folder / f'control-{number}.sock'}" for number in range(count)) if alone else ()
    prompt_secret = settings.prompt_secret or settings.tenant_secret or secrets.token_hex(32)
    stop_within = Nanos(settings.drain_timeout_ms * MILLISECOND + STOP_WITHIN)
    limits = liveness_limits(SupervisionSettings(), ROUTER)
    overflow = {
        model: hosted if hosted.ledger else structs.replace(hosted, ledger=str(folder / f"spending-{number}.json"))
        for number, (model, hosted) in enumerate(settings.overflow.items())
    }
    processes = []
    for number, own in enumerate(sockets):
        name = f"{settings.router_id}-{number}"
        own_settings = structs.replace(
            settings,
            router_id=name,
            http_listen=http,
            grpc_listen=grpc,
            control_listen=controls[number] if alone else control,
            health_listen=health,
            kserve_listen=kserve,
            endpoint_picker=picker,
            share_ports=True,
            prompt_secret=prompt_secret,
            record=settings.record and f"{settings.record}-{number}",
            replicas_listen=own,
            replicas=tuple(other for other in sockets if other != own),
            overflow=overflow,
        )
        path = folder / f"router-{number}.json"
        save(own_settings, path)
        child = ChildProcess(name=name, start_stage=0, stop_stage=0, ready_within=READY_WITHIN, stop_within=stop_within)
        command = (sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(path))
        processes.append(LocalProcess(child=child, command=command, limits=limits))
    return RouterProcesses(
        processes=tuple(processes),
        http=http,
        grpc=grpc,
        control=control,
        control_sockets=controls,
        health=health,
        kserve=kserve,
        picker=picker.listen if picker else "",
    )


def _control(settings: RouterSettings, grpc: str, held: ExitStack) -> str:
    """Return the control address that all processes share: a TCP port, or the socket of the control relay."""
    if settings.control_listen:
        listen = settings.control_listen
        return listen if unix_path(listen) else claim_address("control_listen", listen, held)
    private_folder()
    return control_socket(grpc)


def _claimed(settings: EndpointPickerSettings, held: ExitStack) -> EndpointPickerSettings:
    port = claim_address("endpoint_picker", settings.listen, held).rpartition(":")[2]
    return structs.replace(settings, port=int(port))
