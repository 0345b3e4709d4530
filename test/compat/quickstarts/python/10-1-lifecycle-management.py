manual = await Sandbox.create(
    "ubuntu",
    connection_config=config,
)
