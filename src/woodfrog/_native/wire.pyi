"""The message tables of native/wire/wire.h. A layout is (format for the struct module, field names)."""

Layout = tuple[str, tuple[str, ...]]

MAGIC: int
VERSION: int
MAX_MESSAGE: int
MAX_ENTRIES: int
AGENT_THREAD_NAME: str
WAKE_SIGNAL_OFFSET: int
FLAG_LAST: int
FLAG_SAME: int
CONTROL_WITHDRAW: int
CONTROL_OWN: int
CONTROL_ASK: int
CONTROL_SHARED: int
HEADER: Layout
STATES: dict[str, int]
STATUSES: dict[str, int]
KINDS: dict[str, int]
SPENDINGS: dict[str, int]
OBSTACLES: dict[str, int]  # name: bit mask
MESSAGES: dict[str, tuple[int, Layout, Layout, str]]  # name: (number, body, entry, who sends it)
