"""Recording router: records the messages that its connections to peer routers pass to it."""

from fleet.router.kv_index.peer_prompts import PromptAnnouncements
from fleet.router.messages import PeerPlaced
from fleet.router.sessions import SessionTable


class RecordingRouter:
    """Takes the place of a router and of its registry, and records what it receives."""

    def __init__(self):
        self.on_change = None
        self.events = []
        self.placed = []
        self.sessions = SessionTable(ttl_seconds=1, capacity=1)
        self.prompts = PromptAnnouncements()

    def registrations(self):
        return ()

    def booked(self):
        return {}

    def hear(self, event):
        self.events.append(type(event).__name__)
        if isinstance(event, PeerPlaced):
            self.placed += event.placed

    def register(self, event):
        self.events.append(type(event).__name__)

    deregister = register
