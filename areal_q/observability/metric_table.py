"""The table of all metrics: names, units, meanings, and where each is shown.

docs/metrics.md, the report's explanations and what Prometheus reads are made from it. A `*` in a name stands
for a part that depends on the run, such as a version lag, an engine or a part of the reward; one series each.
"""

import re
from dataclasses import dataclass
from typing import Literal

Source = Literal["step", "eval", "worker"]
"""The place of a figure's values: records of these kinds, or the heartbeats within step records."""


@dataclass(frozen=True)
class Metric:
    key: str
    unit: str
    meaning: str
    exported: str = ""
    """Its name in Prometheus, without the prefix, ending with its unit, or with `_total` for a counter; "" for
    one that is not exported."""
    split: str = ""
    """The label that tells its series in Prometheus apart; "" for the word before `_*` in the key, if any."""
    figure: str = ""
    """The figure of FIGURES that shows it; "" for one of its own, among the report's last."""
    line: str = ""
    """Its label in that figure, if there are others. Each `*` is replaced by what one of the key stands for, in their order."""
    name: str = ""
    """Its name in the tables of final figures and of replays; "" for one that they leave out."""
    best: Literal["", "max", "min"] = ""
    """The best of its values, if any is."""
    leading: bool = False
    """True if it is in the report's legend, and among the first that a replay compares."""
    rounding: tuple[float, float] | None = None
    """The (relative, absolute) bounds of its difference in a replay in which only rounding differs; None for
    one that such a replay does not compare."""

    def match(self, key: str) -> re.Match[str] | None:
        """Returns the match, with what each `*` stands for as its groups, if this line describes the metric
        `key`: "reward/part_*" describes "reward/part_a"."""
        return re.fullmatch(re.escape(self.key).replace(r"\*", "(.+)"), key)

    @property
    def label(self) -> str:
        """The label that tells its series in Prometheus apart; "" for a single series."""
        found = re.search(r"(\w+)_\*", self.key)
        return self.split or (found[1] if found else "")

    def line_of(self, key: str) -> str:
        """Returns the label of the metric `key` in its figure."""
        line, found = self.line, self.match(key)
        for part in found.groups() if found else ():
            line = line.replace("*", part, 1)
        return line


@dataclass(frozen=True)
class Figure:
    id: str
    section: str
    title: str
    unit: str = ""
    scale: float = 1.0
    """Factor for the axis; CSV and columns have the metric as it was recorded."""
    source: Source = "step"
    log: bool = False
    """True for a logarithmic axis"""
    zero: bool = False
    """True if the axis includes 0"""


W = "w = π_prox / π_behav, the learner's probability of a token over the rollout's"
R = "R = π_θ / π_prox, the updated policy's probability of a token over its probability before the step"
METRICS = (
    Metric("step", "steps", "Learner steps done; the newest weight version.", exported="learner_step"),
    Metric("time_s", "s", "Unix time of the record.", exported="learner_record_timestamp_seconds"),
    Metric("eval/accuracy", "share", "Share of the held-out problems that greedy decoding answers correctly.", exported="held_out_accuracy_ratio", figure="accuracy", name="held-out accuracy", best="max", leading=True),
    Metric("eval/invalid", "problems", "Answers whose reward failed; the accuracy is that of the others."),
    Metric("eval/problems", "problems", "Held-out problems that this evaluation asked."),
    Metric("eval/late_by", "versions", "By how many versions the weights that answered were newer than the version that the evaluation is of, the mean over tokens: the workers learn of new weights while they evaluate."),
    Metric("eval/loss", "nats per token", "Mean cross-entropy of the held-out rows of `areal-q sft`: of what the assistant wrote in them.", exported="held_out_loss_nats", figure="heldout_loss", name="held-out loss", best="min", leading=True),
    Metric("eval/turns", "turns", "Mean number of turns that the model drew for a held-out problem, on all paths of its episode, where an environment or an agent plays it."),
    Metric("eval/reward", "", "Mean reward of these episodes, those with a valid reward."),
    Metric("eval/invalid/*", "problems", "Episodes without a reward by what failed, such as timeout for one whose agents fell silent."),
    Metric("eval/*/accuracy", "share", "Accuracy on one set of eval.sets, or on the held-out problems of one task of a mixture; of several samples to a problem the mean.", exported="eval_set_accuracy_ratio", split="set", figure="eval_sets", line="*"),
    Metric("eval/*/pass_at_*", "share", "Chance that one of k samples to a problem of the set is right, the mean over problems, without bias.", figure="eval_pass", line="* pass@*"),
    Metric("eval/*/late_by", "versions", "The same as eval/late_by, of the set."),
    Metric("eval/*/invalid", "answers", "Answers to the set whose reward failed; its accuracy is that of the others."),
    Metric("eval/*/turns", "turns", "The same as eval/turns, of the set."),
    Metric("eval/*/reward", "", "The same as eval/reward, of the set."),
    Metric("eval/*/invalid/*", "answers", "The same as eval/invalid/*, of the set."),
    Metric("eval/*/problems", "problems", "Problems of the set that this evaluation asked."),
    Metric("reward/mean", "", "Mean reward of the step's responses, those with a valid reward.", exported="reward_mean", figure="reward", name="reward", best="max", leading=True),
    Metric("reward/std", "", "Standard deviation of the rewards over the same responses.", figure="reward_std"),
    Metric("reward/errors", "responses", "Responses of the step whose reward failed: it raised, took too long or its process ended; those that count as 0 among them."),
    Metric("reward/invalid", "responses", "Responses of the step that have no valid reward, because computing it failed: they are left out of it."),
    Metric("reward/invalid/*", "responses", "The same, by what failed."),
    Metric("reward/part_*", "", "Mean over the step's responses of one named part of the reward, 0 where a response has not that part."),
    Metric("reward/parts_left_out", "names", "Parts of the reward in this step beyond the 64 names that a run's metrics may have."),
    Metric("reward/uniform_share", "share", "Share of the step's groups whose rewards are all equal, so that they teach nothing; those dropped by learner.drop_uniform are in buffer/dropped_uniform.", exported="reward_uniform_ratio", figure="cut_off", line="uniform groups"),
    Metric("source/*/share", "share", "Share of the step's groups that are of this task of a mixture.", figure="source_share", line="*"),
    Metric("source/*/reward_mean", "", "Mean reward of the task's valid responses in the step.", exported="source_reward_mean", split="source", figure="source_reward", line="*"),
    Metric("source/*/uniform_share", "share", "Share of the task's groups in the step whose rewards are all equal.", figure="source_uniform", line="*"),
    Metric("reward/right", "responses", "Where the reward comes from a user's file: responses that are right by the task's own grader, or for a Python task because they equal what is expected. One of each group of the step is looked at."),
    Metric("reward/right_refused", "responses", "Those of them that the reward calls wrong."),
    Metric("reward/wrong", "responses", "The same, of responses that the task's own grader calls wrong."),
    Metric("reward/wrong_accepted", "responses", "Those of them that the reward calls right."),
    Metric("response/tokens_mean", "tokens", "Mean length of the step's responses.", exported="response_tokens_mean", figure="length", name="response tokens"),
    Metric("response/cut_off_share", "share", "Share of the step's responses that were cut off before their end, by rollout.sampling.max_tokens or rollout.request_timeout_s.", exported="response_cut_off_ratio", figure="cut_off", line="cut off", name="responses cut off"),
    Metric("warmstart/step", "steps", "Supervised steps done before RL."),
    Metric("warmstart/steps", "steps", "Supervised steps to be done before RL."),
    Metric("warmstart/loss", "nats per token", "Cross-entropy of the supervised steps."),
    Metric("train/loss", "", "Loss, the mean over the optimizer steps of this learner step.", exported="train_loss", figure="loss", name="loss", rounding=(0.0, 0.001)),
    Metric("train/grad_norm", "", "Norm of the gradient before it is clipped.", exported="train_grad_norm", figure="grad_norm", name="gradient norm", leading=True, rounding=(0.02, 0.0)),
    Metric("train/lr", "", "Learning rate of the last optimizer step of this learner step, even if it was skipped.", exported="train_learning_rate", figure="lr"),
    Metric("train/skipped_steps", "optimizer steps", "Optimizer steps skipped since the start because a gradient was not finite.", exported="train_skipped_steps_total"),
    Metric("train/tokens", "tokens", "Tokens that a supervised step learnt: those that the assistant wrote."),
    Metric("train/epoch", "passes", "Passes over the rows of `areal-q sft` so far."),
    Metric("train/microbatch_tokens", "tokens", "The most tokens of one forward and backward pass, as the step was computed."),
    Metric("loss/total", "", "What is minimised: the sum of the terms below, over all optimizer steps of this learner step; train/loss is the mean over them."),
    Metric("loss/all_masked_count", "microbatches", "Microbatches in which the objective masked every token; each epoch counts its own."),
    Metric("loss/*", "", "One term of the loss, over all optimizer steps of this learner step."),
    Metric("lag/mean", "versions", "Version lag: by how many weight versions the step's tokens are behind the learner, on average.", exported="lag_mean_versions", figure="lag", line="mean", name="version lag, mean", leading=True),
    Metric("lag/max", "versions", "The largest version lag of the step's tokens; learner.max_lag bounds it.", exported="lag_max_versions", figure="lag", line="max", name="version lag, max", leading=True),
    Metric("mismatch/kl", "nats per token", "How far the policy that generated is from the one that learns: the KL estimate k1, mean(−log w). It is unbiased, but its terms cancel, so that it may be near 0 or negative by chance.", figure="mismatch_kl", line="k1", rounding=(0.0, 0.001)),
    Metric("mismatch/kl_k3", "nats per token", "The same KL by the estimate k3, mean(w − 1 − log w), which is never negative and varies less: the one that is shown as *the* mismatch KL.", exported="mismatch_kl_nats", figure="mismatch_kl", line="k3", name="mismatch KL (k3)", leading=True),
    Metric("mismatch/cause/engine_kl_k3", "nats per token", "The part of mismatch/kl_k3 that quantization and the engine cause: tokens of version lag 0."),
    Metric("mismatch/cause/staleness_kl_k3", "nats per token", "What older weights add to it; both parts sum up to mismatch/kl_k3."),
    Metric("mismatch/tokens", "tokens", "Response tokens that the step learns from."),
    Metric("mismatch/weight_mean", "", f"Mean over tokens of the mismatch weight {W}; it is 1 where both agree.", figure="weight", line="mean"),
    Metric("mismatch/weight_max", "", "The largest mismatch weight w of the step, before truncation.", exported="mismatch_weight_max", figure="weight", line="max", name="largest w"),
    Metric("mismatch/weight_p99", "", "The mismatch weight w that 99 % of the tokens stay below, before truncation.", exported="mismatch_weight_p99", figure="weight", line="p99"),
    Metric("mismatch/ess", "share", "Effective sample size of the weights w as a share of the tokens: 1 where all weights are equal, small where a few tokens dominate.", exported="mismatch_ess_ratio", figure="ess", name="effective sample size of w", best="max"),
    Metric("mismatch/truncated_fraction", "share", "Share of the tokens whose mismatch weight w the objective cut off at its cap.", figure="masked", line="weight truncated", name="truncated weights"),
    Metric("mismatch/lag_*/kl", "nats per token", "The mismatch KL by the estimate k1 of the tokens with this version lag alone; lag_3 means 3 or more.", figure="mismatch_kl_lag", line="lag *"),
    Metric("mismatch/lag_*/tokens", "tokens", "Response tokens of the step with this version lag; lag_3 means 3 or more.", figure="lag_tokens", line="lag *"),
    Metric("mismatch/lag_*/kl_k3", "nats per token", "The mismatch KL by the estimate k3 of the tokens with this version lag alone.", exported="mismatch_kl_by_lag_nats"),
    Metric("mismatch/lag_*/*", "as above", "The metric of the same name, of the tokens with this version lag alone; lag_3 means 3 or more."),
    Metric("policy/ratio_mean", "", f"Mean over tokens of the policy ratio {R}.", figure="ratio", line="mean"),
    Metric("policy/ratio_max", "", "The largest policy ratio R of the step.", exported="policy_ratio_max", figure="ratio", line="max"),
    Metric("policy/ratio_p99", "", "The policy ratio R that 99 % of the tokens stay below.", figure="ratio", line="p99"),
    Metric("policy/kl", "nats per token", "How far the step's updates moved the policy: the KL estimate k1, mean(−log R).", exported="policy_kl_nats", figure="policy_kl", line="k1"),
    Metric("policy/kl_k3", "nats per token", "The same KL by the estimate k3, mean(R − 1 − log R), which is never negative.", figure="policy_kl", line="k3", name="policy KL (k3)"),
    Metric("policy/clip_fraction_up", "share", "Share of the tokens whose ratio was clipped from above: a good token that had become likely enough.", exported="policy_clipped_up_ratio", figure="clipped", line="above", name="clipped above", leading=True),
    Metric("policy/clip_fraction_down", "share", "Share of the tokens whose ratio was clipped from below: a bad token that had become unlikely enough.", exported="policy_clipped_down_ratio", figure="clipped", line="below", name="clipped below", leading=True),
    Metric("policy/clip_fraction_dual", "share", "Share of the tokens held by the second bound for bad tokens (dual clip).", figure="clipped", line="dual"),
    Metric("policy/mask_fraction", "share", "Share of the tokens that the objective left out of the loss.", exported="policy_masked_ratio", figure="masked", line="masked out"),
    Metric("policy/entropy", "nats per token", "Entropy of the policy's next-token distribution: near 0 it always answers alike and explores nothing.", exported="policy_entropy_nats", figure="entropy", name="entropy", leading=True, rounding=(0.001, 0.001)),
    Metric("policy/bounded_tokens", "tokens", "Tokens whose log ratio was beyond what a float can hold and was bounded; each epoch counts its own."),
    Metric("policy/lag_*/*", "as above", "The metric of the same name, of the tokens with this version lag alone; lag_3 means 3 or more."),
    Metric("reference/kl", "nats per token", "KL of the policy to the reference policy (learner.reference_kl), estimate k1."),
    Metric("reference/kl_k3", "nats per token", "The same by the estimate k3, which is never negative."),
    Metric("teacher/kl", "nats per token", "Reverse KL of the policy before the step to the teacher (learner.teacher), estimate k1: what a distillation lowers.", exported="teacher_kl_nats", figure="teacher_kl", line="k1", name="KL to the teacher", best="min"),
    Metric("teacher/kl_k3", "nats per token", "The same by the estimate k3, which is never negative.", figure="teacher_kl", line="k3"),
    Metric("teacher/score_s", "s", "Time that the teacher took to score the step's responses."),
    Metric("value/mean", "", "Mean value that the critic gives a token."),
    Metric("value/return_mean", "", "Mean return that the critic is trained towards."),
    Metric("value/explained_variance", "share", "Share of the variance of the returns that the critic explains; 1 is perfect, 0 or less is useless."),
    Metric("value/clip_fraction", "share", "Share of the tokens whose value was clipped."),
    Metric("value/grad_norm", "", "Norm of the critic's gradient before it is clipped."),
    Metric("routing/disagreement", "share", "Share of (token, layer) for which the learner's router would have chosen other experts than the rollout did.", exported="routing_disagreement_ratio", figure="routing"),
    Metric("fidelity/engine_*/gap_mean_nats", "nats per token", "Mean gap between the engine's logged log-probs and what the same published weights give in the learner.", exported="fidelity_gap_mean_nats"),
    Metric("fidelity/engine_*/gap_max_nats", "nats", "The largest such gap of a token.", exported="fidelity_gap_max_nats"),
    Metric("fidelity/engine_*/bound_nats", "nats per token", "Mean gap beyond which an engine counts as unfaithful: learner.fidelity.bound_nats, or what the format's noise on this model may reach.", exported="fidelity_bound_nats"),
    Metric("fidelity/engine_*/noise_mean_nats", "nats per token", "How far float32's own rounding moves the same log-probs: the part of the gap that no kernel and no alignment removes. Measured where the gap exceeds the setting."),
    Metric("fidelity/engine_*/version", "version", "The weight version that was scored again."),
    Metric("fidelity/engine_*/*", "see name", "The engine's logged log-probs beside what the same published weights give in the learner."),
    Metric("learner/step_s", "s", "Wall time of the step, waiting included.", exported="learner_step_seconds", figure="step_time", line="step"),
    Metric("learner/wait_s", "s", "The part of it that the learner waited for groups.", exported="learner_wait_seconds", figure="step_time", line="waiting"),
    Metric("learner/idle_share", "share", "learner/wait_s over learner/step_s.", figure="idle", line="learner", name="learner idle", best="min"),
    Metric("learner/tokens_per_s", "tokens/s", "Response tokens that the learner learnt from per second; of `areal-q sft` all tokens of its rows.", exported="learner_tokens_per_second", figure="throughput", line="learner", name="learner tokens/s", best="max", leading=True),
    Metric("learner/replay_exact_steps", "steps", "Steps replayed since a resume that gave the recorded weights, bit for bit."),
    Metric("learner/replay_differs_at", "step", "The first step replayed since a resume that gave other weights than recorded."),
    Metric("rollout/tokens_per_s", "tokens/s", "Response tokens that all live workers drew per second, since the step before.", exported="rollout_tokens_per_second", figure="throughput", line="rollout", name="rollout tokens/s", best="max", leading=True),
    Metric("rollout/idle_share", "share", "Share of the time since the step before in which workers had nothing to generate, the mean over workers.", figure="idle", line="rollout", name="rollout idle", best="min"),
    Metric("rollout/episodes", "episodes", "Episodes that agents play, or may begin at a worker's endpoint (rollout.environment.type = external)."),
    Metric("rollout/open_episodes", "episodes", "Those of them that an agent plays."),
    Metric("buffer/open_tickets", "tickets", "Tickets admitted and not yet learnt from.", exported="buffer_open_tickets", figure="buffer", line="open tickets"),
    Metric("buffer/groups", "groups since the start", "Groups read, dropped ones as well.", exported="buffer_groups_total"),
    Metric("buffer/dropped_stale", "groups since the start", "Groups dropped because they were too old when they arrived.", exported="buffer_dropped_stale_total", figure="buffer", line="dropped, too old"),
    Metric("buffer/dropped_uniform", "groups since the start", "Groups dropped because all their rewards were equal (learner.drop_uniform).", exported="buffer_dropped_uniform_total", figure="buffer", line="dropped, uniform"),
    Metric("buffer/dropped_invalid", "groups since the start", "Groups dropped because too few of their responses have a valid reward.", exported="buffer_dropped_invalid_total"),
    Metric("buffer/responses", "responses since the start", "Responses read, in dropped groups as well.", exported="buffer_responses_total"),
    Metric("buffer/reward_errors", "responses since the start", "Responses whose reward failed, in dropped groups as well.", exported="buffer_reward_errors_total", figure="buffer", line="rewards failed"),
    Metric("buffer/invalid/*", "responses since the start", "Responses left out because their reward failed, by what failed, in dropped groups as well.", exported="buffer_invalid_total", split="cause"),
    Metric("buffer/removed", "groups since the start", "Groups removed because a bound of buffer.removal was passed.", exported="buffer_removed_total"),
    Metric("buffer/duplicates", "groups since the start", "Groups refused because their ticket had counted already.", exported="buffer_duplicates_total"),
    Metric("buffer/held", "groups", "Groups that the next step can choose from.", exported="buffer_held_groups"),
    Metric("buffer/quarantined", "records", "Records that could not be read or broke the contract, and were set aside.", exported="buffer_quarantined_total", figure="buffer", line="quarantined"),
    Metric("buffer/full", "0 or 1", "1 while Redis is at its memory limit.", exported="buffer_full"),
    Metric("buffer/refused_admissions", "since the start", "Times that Redis refused new tickets."),
    Metric("buffer/refused_heartbeats", "heartbeats", "Heartbeats that cannot be read, so that their workers count for nothing here."),
    Metric("buffer/waiting_commits", "groups", "Finished groups that wait at workers for room in Redis.", exported="buffer_waiting_commits"),
    Metric("redis/up", "0 or 1", "1 while Redis answers the learner; in Prometheus alone, every 5 seconds.", exported="redis_up"),
    Metric("redis/used_bytes", "bytes", "Memory that Redis uses.", exported="redis_used_bytes"),
    Metric("redis/limit_bytes", "bytes", "Redis's maxmemory; 0 means no limit.", exported="redis_limit_bytes"),
    Metric("weights/bytes", "bytes", "Size of a whole weight version.", exported="weights_bytes", figure="weight_bytes", line="whole version"),
    Metric("weights/publish_s", "s", "Time that the learner spent on publishing the version.", exported="weights_publish_seconds", figure="publish"),
    Metric("weights/make_s", "s", "Time to quantize and hash the version."),
    Metric("weights/codes_moved", "share", "Share of the quantized codes that differ from the version before."),
    Metric("weights/delta_bytes", "bytes since the start", "Deltas made and sent.", exported="weights_delta_bytes_total"),
    Metric("weights/delta_bytes_of_step", "bytes", "Growth of weights/delta_bytes in one step; worked out by the report.", figure="weight_bytes", line="delta sent"),
    Metric("weights/fetches", "since the start", "Whole versions that workers fetched.", exported="weights_fetches_total", figure="fetches", line="fetched"),
    Metric("weights/refused", "since the start", "Malformed requests on the weight ports.", exported="weights_refused_total", figure="fetches", line="refused"),
    Metric("weights/catch_ups", "since the start", "Deltas that workers behind the newest version fetched.", exported="weights_catch_ups_total"),
    Metric("weights/stalls", "since the start", "Deltas that took too long to make.", exported="weights_stalls_total"),
    Metric("weights/behind_s", "s", "The longest time that a live worker has known of newer weights without having them.", exported="weights_behind_seconds"),
    Metric("workers", "workers", "Workers with a recent heartbeat; in metrics.jsonl their heartbeats.", exported="workers"),
    Metric("fault/*", "steps", "For how many steps a fault of learning has lasted, 0 without it; in Prometheus alone.", exported="learning_fault_steps", split="fault"),
    Metric("run/ended", "0 or 1", "1 once the last step is done and exported; in Prometheus alone.", exported="run_ended"),
    Metric("disk/free_bytes", "bytes", "Free bytes on the disk of the run's directory; in Prometheus alone.", exported="disk_free_bytes"),
    Metric("disk/size_bytes", "bytes", "Size of this disk; in Prometheus alone.", exported="disk_size_bytes"),
    Metric("disk/needed_bytes", "bytes", "Bytes that the run will still add to it; in Prometheus alone.", exported="disk_needed_bytes"),
    Metric("nonfinite", "metrics", "Metrics of this record that were not finite; they are written as null."),
)  # fmt: skip
WORKER_METRICS = (
    Metric("time_s", "s", "Unix time of the heartbeat.", exported="worker_record_timestamp_seconds"),
    Metric("version", "version", "The weight version that the worker's engine runs.", exported="worker_weights_version", figure="worker_version"),
    Metric("active", "responses", "Responses that are being generated.", exported="worker_active_responses", figure="worker_active"),
    Metric("slots", "responses", "Responses that the engine can generate at once.", exported="worker_slots"),
    Metric("tokens", "tokens since the start", "Response tokens drawn.", exported="worker_tokens_total"),
    Metric("busy_s", "s since the start", "Time with something to generate.", exported="worker_busy_seconds_total"),
    Metric("tokens_per_s", "tokens/s", "Response tokens drawn per second, over the last ten heartbeats.", exported="worker_tokens_per_second", figure="worker_rate"),
    Metric("idle_share", "share", "Share of the time of these heartbeats without anything to generate.", exported="worker_idle_ratio", figure="worker_idle"),
    Metric("loop_lag_s", "s", "How late the worker's event loop was, in the worst hundredth of the last 30 s: heartbeats, Redis and the endpoint share it.", exported="worker_loop_lag_seconds"),
    Metric("loop_lag_max_s", "s", "The most that it was late in these 30 s.", exported="worker_loop_lag_max_seconds"),
    Metric("groups", "since the start", "Groups committed.", exported="worker_groups_total"),
    Metric("swaps", "since the start", "Weight versions swapped in.", exported="worker_swaps_total"),
    Metric("swap_s", "s", "Mean pause of generation for a swap.", exported="worker_swap_seconds", figure="swap"),
    Metric("waiting", "groups", "Finished groups that wait for room in Redis.", exported="worker_waiting_groups"),
    Metric("full_s", "s since the start", "Time that commits waited for room in Redis.", exported="worker_full_seconds_total"),
    Metric("timeouts", "since the start", "Responses cut by rollout.request_timeout_s.", exported="worker_timeouts_total"),
    Metric("resumed", "since the start", "Responses continued from what another worker had drawn.", exported="worker_resumed_total"),
    Metric("episodes", "episodes", "Episodes of the worker's tickets that agents play, or may begin.", exported="worker_episodes"),
    Metric("open_episodes", "episodes", "Those of them that an agent plays.", exported="worker_open_episodes"),
    Metric("behind_s", "s", "How long the worker has known of newer weights without having them.", exported="worker_behind_seconds"),
    Metric("stalls", "since the start", "Times that this went on for too long.", exported="worker_stalls_total"),
    Metric("refused_weights", "since the start", "Versions refused: of another model than the engine's.", exported="worker_refused_weights_total"),
)  # fmt: skip
RELAY_METRICS = (
    Metric("version", "", "Version that it serves.", exported="relay_weights_version"),
    Metric("subscribers", "", "Workers and relays that listen.", exported="relay_subscribers"),
    Metric("received", "", "Versions verified.", exported="relay_received_total"),
    Metric("behind_s", "", "Newer weights known, and none arrived.", exported="relay_behind_seconds"),
    Metric("stalls", "", "Times that this went on for too long.", exported="relay_stalls_total"),
    Metric("received_bytes", "", "Deltas and payloads from upstream.", exported="relay_received_bytes_total"),
    Metric("sent_bytes", "", "Deltas (once each) and chunks.", exported="relay_sent_bytes_total"),
    Metric("fetches", "", "Snapshots fetched by workers.", exported="relay_fetches_total"),
    Metric("catch_ups", "", "Deltas fetched by workers behind.", exported="relay_catch_ups_total"),
    Metric("refused", "", "Frames and versions refused, unknown keys.", exported="relay_refused_total"),
)  # fmt: skip
FIGURES = (
    Figure("reward", "Learning", "Reward", "mean of a step"),
    Figure("accuracy", "Learning", "Held-out accuracy", source="eval"),
    Figure("heldout_loss", "Learning", "Held-out loss", "nats per token", source="eval"),
    Figure("eval_sets", "Learning", "Accuracy by evaluation set", source="eval"),
    Figure("eval_pass", "Learning", "pass@k by evaluation set", source="eval"),
    Figure("source_reward", "Learning", "Reward by task of the mixture", "mean of a step"),
    Figure("source_uniform", "Learning", "Uniform groups by task of the mixture", "%", scale=100, zero=True),
    Figure("source_share", "Learning", "Groups by task of the mixture", "%", scale=100, zero=True),
    Figure("loss", "Learning", "Loss"),
    Figure("grad_norm", "Learning", "Gradient norm", "before clipping", zero=True),
    Figure("entropy", "Learning", "Entropy", "nats per token", zero=True),
    Figure("teacher_kl", "Learning", "KL to the teacher", "nats per token"),
    Figure("length", "Learning", "Response length", "tokens", zero=True),
    Figure("cut_off", "Learning", "Responses cut off, uniform groups", "%", scale=100, zero=True),
    Figure("reward_std", "Learning", "Spread of rewards", "std of a step", zero=True),
    Figure("lr", "Learning", "Learning rate", zero=True),
    Figure("mismatch_kl", "Mismatch", "Mismatch KL", "nats per token"),
    Figure("mismatch_kl_lag", "Mismatch", "Mismatch KL by version lag", "nats per token"),
    Figure("weight", "Mismatch", "Mismatch weight w", "π_prox / π_behav", log=True),
    Figure("ess", "Mismatch", "Effective sample size of w", "share"),
    Figure("routing", "Mismatch", "Routes of experts that the learner would not take", "% of token-layers", scale=100, zero=True),
    Figure("ratio", "Policy", "Policy ratio R", "π_θ / π_prox", log=True),
    Figure("policy_kl", "Policy", "Policy KL", "nats per token"),
    Figure("clipped", "Policy", "Clipped tokens", "%", scale=100, zero=True),
    Figure("masked", "Policy", "Truncated and masked tokens", "%", scale=100, zero=True),
    Figure("lag", "Staleness", "Version lag of tokens", "versions", zero=True),
    Figure("lag_tokens", "Staleness", "Tokens by version lag", "tokens of a step", zero=True),
    Figure("throughput", "Throughput", "Throughput", "1000 tokens/s", scale=0.001, zero=True),
    Figure("idle", "Throughput", "Idle", "% of the time", scale=100, zero=True),
    Figure("step_time", "Throughput", "Time of a step", "s", zero=True),
    Figure("buffer", "Throughput", "Buffer", "tickets and groups", zero=True),
    Figure("worker_rate", "Workers", "Throughput of a worker", "1000 tokens/s", scale=0.001, source="worker", zero=True),
    Figure("worker_idle", "Workers", "Idle of a worker", "% of the time", scale=100, source="worker", zero=True),
    Figure("worker_active", "Workers", "Responses in generation", source="worker", zero=True),
    Figure("worker_version", "Workers", "Version loaded", source="worker"),
    Figure("weight_bytes", "Weights", "Bytes of a version", "MB", scale=1e-6, log=True),
    Figure("publish", "Weights", "Learner's pause to publish", "ms", scale=1000, zero=True),
    Figure("swap", "Weights", "Worker's mean pause for a swap", "ms", scale=1000, source="worker", zero=True),
    Figure("fetches", "Weights", "Whole versions fetched, refused", "since the start", zero=True),
)  # fmt: skip


def describe(key: str, table: tuple[Metric, ...] = METRICS) -> Metric | None:
    """Returns the first line that describes the metric `key`; None for one that is not in the table."""
    return next((metric for metric in table if metric.match(key)), None)
