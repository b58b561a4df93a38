"""The policy process: `python -m services.policy`."""

from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.policy.v1.policy_service_pb2_grpc import add_PolicyServiceServicer_to_server

from services.mesh.process import run_service
from services.mesh.shell import Shell
from services.mesh.telemetry.progress import Phase
from services.policy.decide import PolicyMode, PolicyRules
from services.policy.server import Policy


async def main(shell: Shell) -> None:
    """Advises until told to stop."""
    settings = shell.settings.policy
    rules = PolicyRules(
        prefill_threshold_tokens=settings.prefill_threshold_tokens,
        release_threshold_tokens=settings.release_threshold_tokens,
        min_dwell_s=settings.min_dwell_s,
        rest_s=settings.rest_s,
        resting_layout=settings.resting_layout,
    )
    policy = Policy(PolicyMode(settings.mode), rules, shell.log)
    shell.introspection.report(policy.fill_status)
    descriptor = policy_service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
    shell.server.add(add_PolicyServiceServicer_to_server, policy, descriptor)
    async with shell.server.running():
        shell.progress.enter(Phase.READY)
        await shell.stop.wait()


if __name__ == "__main__":
    run_service("policy", main)
