"""What the engine tests, the demo and the benches share: processes with deadlines, clients,
scripts of sessions, comparison."""
