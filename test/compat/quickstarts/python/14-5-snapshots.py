from opensandbox.manager import SandboxManager
from opensandbox.models.sandboxes import SnapshotFilter

async with await SandboxManager.create(connection_config=config) as manager:
    # Create a snapshot from a running sandbox, then wait until it is Ready
    snapshot = await manager.create_snapshot(sandbox_id, name="pre-migration")

    info = await manager.get_snapshot(snapshot.id)
    while info.status.state == "Creating":
        await asyncio.sleep(2)
        info = await manager.get_snapshot(snapshot.id)
    if info.status.state != "Ready":
        raise RuntimeError(
            f"snapshot not Ready: state={info.status.state} reason={info.status.reason}"
        )

    # List all snapshots
    page = await manager.list_snapshots(SnapshotFilter())

# Restore: create a new sandbox FROM a snapshot (image and snapshot_id are
# mutually exclusive — set exactly one)
restored = await Sandbox.create(
    snapshot_id=snapshot.id,
    connection_config=config,
)

# Only delete the snapshot after the restore has succeeded
async with await SandboxManager.create(connection_config=config) as manager:
    await manager.delete_snapshot(snapshot.id)
