"""`areal-q launch`: a run on a cluster that has a scheduler of its own: Slurm, SkyPilot or Ray.

    areal-q launch ─▶ PLACE: settings, secrets, scripts ─▶ sbatch, sky launch, ray job submit
                                      │ on the hosts
                                      ▼
    role.py   Redis and the learner's ranks, or a worker, each under the supervisor of our containers

The scripts ask for hosts and start roles; what a role does is the same under each scheduler.
"""
