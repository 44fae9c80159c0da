"""mpirun -np W python tests/mpi/rank_resume.py: a conversation that goes on, or is read afresh."""

from dataclasses import replace

from drive import greedy, make, ORACLE, random_ids, run_script, world

MODEL = ("--model", ORACLE / "tiny-bf16", "--context", 512, "--parallel", 3, "--chunk", 50)
PLACEMENTS = {"striped": (), "owner": ("--placement", "owner"), "R = 128": ("--replicate", 128),
              "not split": ("--split", "off")}
TURNS = (150, 3, 90, 1, 64)     # new tokens of each turn; across a page, within one, a whole one
TOKENS = 9


def ask(engine, prompts):
    """Serve prompts at once: their replies as [Event without id], on rank 0; else None."""
    if world().rank:
        engine.follow()
        return None
    sampling = replace(greedy(TOKENS), logprobs=7)
    said = {engine.submit(prompt, sampling): [] for prompt in prompts}
    while engine.busy:
        for event in engine.step():
            said[event.id].append(event[1:])
        engine.pool.check()
    engine.stop()
    return list(said.values())


def body(report):
    """Under each placement, two conversations side by side over several turns."""
    for name, options in PLACEMENTS.items():
        engine = make(*MODEL, *options, "--poison", "--shuffle-pages")
        held, cached = [[], []], [0, 0]
        for turn, more in enumerate(TURNS):
            prompts = [[*ids, *random_ids(more, seed=10 * turn + i)]
                       for i, ids in enumerate(held)]
            found = ask(engine, prompts)
            for i, prompt in enumerate(prompts):
                fresh = ask(make(*MODEL, *options), [prompt])
                if world().rank:
                    continue
                said = found[i]
                report.check(f"{name}, turn {turn}, {i}: continued",
                             said[0][-1] == cached[i], f"{said[0][-1]}, not {cached[i]}")
                same = [e[:-1] for e in said] == [e[:-1] for e in fresh[0]]
                report.check(f"{name}, turn {turn}, {i}: as read afresh, log-probabilities too",
                             same)
                held[i] = [*map(int, prompt), *(e[0] for e in said)]
                cached[i] = len(held[i]) - 1    # the last token was not fed


if __name__ == "__main__":
    run_script(body)
