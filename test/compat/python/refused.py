"""What a user of the official OpenSandbox SDK reads when a host has no room.

Prints status, whether the SDK thinks that asking again helps, and the message.
"""

from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException

try:
    SandboxSync.create("base")
except SandboxApiException as refused:
    print(refused.status_code, refused.is_retryable, refused)
