from isochunk import CostModel
from isochunk.core.cost import features
from isochunk.core.guard import Guard


def steps(guard: Guard, model: CostModel, true: CostModel, chunk: int, count: int) -> CostModel | None:
    raised, history = None, 0
    for _ in range(count):
        size = 2 * chunk if guard.doubling else chunk
        raised = guard.step(model, features([size], [history]), true.seconds(size, history))
        history += size
        if raised is not None:
            break
    return raised


def test_four_slow_steps_raise_the_step_cost_to_what_they_cost(model: CostModel) -> None:
    wrong = CostModel(model.c0 / 100, model.c1, model.c2, model.c3 / 100)
    raised = steps(Guard(), wrong, model, 32, 10)
    assert raised is not None
    assert raised.c0 > 0.9 * model.c0


def test_a_slow_machine_raises_no_step_cost(model: CostModel) -> None:
    assert steps(Guard(), model, model.scaled(3.0), 512, 100) is None


def test_true_steps_raise_no_alarm(model: CostModel) -> None:
    assert steps(Guard(), model, model, 512, 100) is None


def test_single_slow_steps_raise_no_alarm(model: CostModel) -> None:
    guard = Guard()
    for step in range(100):
        seconds = model.seconds(512, 0) * (20 if step % 3 == 0 else 1)
        assert guard.step(model, features([512], [0]), seconds) is None


def test_two_harmful_prompts_in_a_row_send_planning_to_rest() -> None:
    guard = Guard()
    assert not guard.prompt(measured=3.0, predicted=1.0, fixed=2.0)
    assert guard.prompt(measured=3.0, predicted=1.0, fixed=2.0)
    assert guard.resting == 8
    assert guard.harmful == 2


def test_a_good_prompt_between_forgives() -> None:
    guard = Guard()
    guard.prompt(measured=3.0, predicted=1.0, fixed=2.0)
    guard.prompt(measured=1.0, predicted=1.0, fixed=2.0)
    assert not guard.prompt(measured=3.0, predicted=1.0, fixed=2.0)


def test_an_alarm_is_raised_once(model: CostModel) -> None:
    # Steps that were in the pipeline already come out after the alarm; they are judged by the raised model.
    wrong = CostModel(model.c0 / 100, model.c1, model.c2, model.c3 / 100)
    guard = Guard()
    raised = steps(guard, wrong, model, 32, 10)
    assert raised is not None
    assert steps(guard, raised, model, 32, 20) is None


def test_good_prompts_shorten_the_next_rest() -> None:
    guard = Guard()
    for _ in range(6):
        guard.prompt(measured=3.0, predicted=1.0, fixed=2.0)
    for _ in range(10):
        guard.prompt(measured=1.0, predicted=1.0, fixed=2.0)
    for _ in range(2):
        guard.prompt(measured=3.0, predicted=1.0, fixed=2.0)
    assert guard.resting == 8


def test_rests_grow_and_stay_bounded() -> None:
    guard = Guard()
    rests = []
    for _ in range(20):
        if guard.prompt(measured=3.0, predicted=1.0, fixed=2.0):
            rests.append(guard.resting)
    assert rests[:3] == [8, 16, 32]
    assert max(rests) == 256
