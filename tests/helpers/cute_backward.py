"""What the backwards of Hopper and of Blackwell have in common: options that are proven, and checks of one backend."""

import dataclasses

import torch
from cute_calls import assert_right, changed, drawn, gradients, judged_gradients, kept_and_made_again, saturated

import kda
from kda.backends.common import training_plan
from kda.backends.sm90.launch import forget_plans
from kda.model.host import host_of, standing_in
from kda.tools.verify.simulated import SimulatedDoor
from ptxkit.compile.target import parse

OPTIONS = {
    "two chunks and a part of one": dict(T=140),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "one token": dict(T=1, H=8),                               # eight draws of a single number are no budget
    "less than the half of a chunk": dict(T=20),
    "no initial state, beta up to 2": dict(T=40, initial_state=False, beta="2*sigmoid"),
    "gates that forget": dict(T=100, regime="fast"),
    "packed, GVA, tokens of none": dict(lengths=(65, 0, 1, 30), padding=140, HV=2),
    "a softplus gate": dict(T=140, gate="softplus"),
    "a softplus gate that forgets, packed, GVA": dict(lengths=(65, 0, 1, 30), HV=2, gate="softplus", regime="fast"),
    "decays given that forget, GVA": dict(T=70, HV=2, gate="given", regime="fast"),
    "no norms": dict(T=70, l2norm=False),
    "beta given": dict(T=70, beta="given"),
    "decays and beta given, no norms": dict(T=70, gate="given", beta="given", l2norm=False),
}
KEPT = {
    "one sequence": dict(T=70),
    "a batch, GVA": dict(B=2, T=70, HV=2),
    "packed, GVA, tokens of none": dict(lengths=(65, 0, 1, 30), padding=140, HV=2),
    "cut into segments": dict(T=290, SHORTEST=4),
    "packed, GVA, cut into segments": dict(lengths=(290, 1), padding=20, HV=2, SHORTEST=2),
}


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward of one backend, on a GPU that has so many SMs."""

    backend: str
    sms: int

    def gradients(self, case, **options):
        return gradients(case, self.backend, **options)

    def judged(self, case, found):
        return judged_gradients(case, found, self.backend)

    def check(self, case, **options):
        """Check that the gradients of a call are those of the definition, and return them."""
        found, session = self.gradients(case, **options)
        assert not session.findings, "\n".join(map(str, session.findings[:5]))
        assert_right(self.judged(case, found))
        return found

    def takes_states_v_first(self, case):
        turned = {"initial_state": case.keywords["initial_state"].mT.contiguous(), "state_v_first": True}
        v_first = dataclasses.replace(case, keywords=case.keywords | turned, dht=case.dht.mT.contiguous())
        (found, _), (expected, _) = self.gradients(v_first), self.gradients(case)
        expected["dh0"] = expected["dh0"].mT
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def hands_gradients_through_sequences_of_no_tokens(self, **words):
        case = drawn(B=2, T=0, **words)
        found, session = self.gradients(case)
        assert not session.findings and torch.equal(found["dh0"], case.dht)
        assert found["dq"].shape == (2, 0, 1, case.spec.K) and not found["dA_log"].any()

    def has_the_same_gradients_in_any_order_of_warps(self, case, schedule):
        expected, _ = self.gradients(case)
        found, session = self.gradients(case, schedule=schedule, early=schedule % 2 == 0)
        assert not session.findings, "\n".join(map(str, session.findings[:5]))
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    def has_gradients_as_large_as_those_that_come_in(self, case, size):
        """Saturated gates included: what is rounded is never beyond what bfloat16 holds."""
        case = saturated(case)
        large = dataclasses.replace(case, do=size * case.do, dht=size * case.dht)
        (found, _), (expected, _) = self.gradients(large), self.gradients(case)
        for name, x in expected.items():
            assert x.isfinite().all() and torch.equal(found[name], size * x), name

    def has_no_gradients_of_gates_that_hide_all_that_was_before(self, case):
        finite = changed(case, g=lambda g: g.clamp(-1000, 1000))                   # no definition has a gradient at inf
        found = self.check(finite)
        (same, _), hidden = self.gradients(case), case.keywords["g"].abs() >= 1000
        assert all(torch.equal(same[name], x) for name, x in found.items())
        assert not found["dg"][hidden].any()

    def takes_float32_gates(self, case):
        found = self.check(changed(case, g=lambda g: g.float() * 1.001))     # not what bfloat16 holds
        assert found["dg"].dtype == torch.float32

    def takes_keys_that_are_all_alike(self):
        case = drawn(T=70, gate="softplus")
        self.check(changed(case, k=lambda k: k[:, :1].expand_as(k).contiguous()))

    def has_the_bits_of_what_is_made_again(self, name, words, keep, monkeypatch):
        """Check a forward that keeps its products, or states alone; SHORTEST says when it is cut into segments."""
        words = dict(words)
        monkeypatch.setattr(training_plan, "SHORTEST", words.pop("SHORTEST", training_plan.SHORTEST))
        forget_plans()
        case = drawn(**words)
        assert ("cut into segments" in name) == bool(training_plan.segment_length(case.problem(), self.sms))
        kept, remade = kept_and_made_again(case, self.backend, keep)
        forget_plans()
        assert_right(self.judged(case, kept))
        assert all(torch.equal(kept[name], x) for name, x in remade.items())

    def has_the_same_gradients_by_autograd(self, kept, **words):
        case, door = drawn(T=33, **words), SimulatedDoor(self.backend, parse(self.backend))
        found, (expected, _) = door.call(case, True, disable_recompute=kept), self.gradients(case)
        assert not door.findings and all(torch.equal(found[name], expected[name]) for name in expected)

    def explains_what_is_kept(self, kept, said):
        case = drawn(T=1024)
        recorded = case.keywords | {"q": case.keywords["q"].clone().requires_grad_()}
        with standing_in(host_of(self.backend)):
            lines = str(kda.explain(**recorded, disable_recompute=kept)).splitlines()
        assert [line for line in lines if line.startswith("* ")] == [f"* {self.backend:10} accepts it"] * 2
        assert lines[-1] == said
