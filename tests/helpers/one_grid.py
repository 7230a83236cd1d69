"""Calls whose walk back and gradients are one grid, on Hopper and on Blackwell, and both ways of running them."""

from cute_calls import gradients
from sm90_forms import FLOAT32, REVERSE, SMALL, TWO_KERNELS, Call, assert_nothing_found, assert_the_same

import kda
from ptxkit import capture

MIXED = [dict(schedule=n, early=True) for n in (1, 2, 3)]
ONE, TWO, FEW = dict(sms=1), dict(sms=2, walkers=2), dict(sms=3, walkers=2)
FAST = dict(gate="softplus", regime="fast")
CUT, LONG = dict(segment_chunks=2), dict(lengths=(150, 0, 1, 65, 64), padding=70)
# the SMs and the CTAs that walk, the chunks of a segment, and the inputs
CALLS = {
    "three heads": (TWO, dict(T=200, HV=3)),
    "one CTA walks, then computes gradients": (ONE, dict(T=150, HV=2)),
    "chunks in pairs": (FEW, dict(T=128, HV=2)),
    "one token": (FEW, dict(T=1, HV=2)),
    "a batch": (FEW, dict(B=2, T=130, HV=2)),
    "more SMs than items": (dict(), dict(T=70)),
    "packed": (FEW, dict(lengths=(65, 0, 1, 130), padding=140, HV=2)),
    "packed, ends with no token": (FEW, dict(lengths=(70, 40, 0), HV=2)),
    "packed, few tokens": (FEW, dict(lengths=(0, 70) + (0,) * 6)),
    "packed, no tokens": (FEW, dict(lengths=(0, 0, 0), padding=70)),
    "softplus gate that forgets": (TWO, dict(T=200, HV=2, **FAST)),
    "one gate per head": (TWO, dict(T=200, HV=2, gate_per_head=True)),
    "given decays, no norms": (TWO, dict(T=200, HV=2, gate="given", l2norm=False)),
    "g of float32": (TWO, dict(T=200, HV=2, **FLOAT32)),
    "segments": (FEW | CUT, dict(T=230, HV=2)),
    "segments, one CTA": (ONE | CUT, dict(B=2, T=130)),
    "segments, packed": (FEW | CUT, dict(HV=2, **LONG)),
    "segments, packed, few tokens": (FEW | CUT, dict(lengths=(0, 0, 70, 0, 0), padding=70)),
    "segments of four chunks, one gate per head": (
        TWO | dict(segment_chunks=4), dict(T=300, HV=2, gate_per_head=True, initial_state=False)
    ),
}
CALLS_OF_64_CHANNELS = {
    "64 channels": (FEW, dict(T=200, HV=3, **SMALL)),
    "64 channels, packed": (FEW, dict(lengths=(65, 0, 1, 130), padding=140, HV=2, **SMALL)),
    "64 channels, one softplus gate per head, packed": (
        FEW, dict(lengths=(65, 0, 1, 130), padding=140, HV=2, gate="softplus", gate_per_head=True, **SMALL)
    ),
    "64 channels, softplus gate that forgets": (TWO, dict(T=200, HV=2, **SMALL, **FAST)),
    "64 channels, a walk holds items back": (ONE, dict(T=1200, **SMALL)),
    "segments, 64 channels": (FEW | CUT, dict(B=2, T=160, HV=2, **SMALL)),
    "segments, 64 channels, packed": (FEW | CUT, dict(HV=2, **SMALL, **FAST, **LONG)),
}


def both_ways(call, backend, force, **options):
    """Return the gradients of a call in one grid and apart, and the session of the former."""
    prescribed, words = call
    case = Call(REVERSE, words).case()
    force(**REVERSE._replace(reverse=None).forced | prescribed)
    expected, _ = gradients(case, backend)
    force(**REVERSE.forced | prescribed)
    found, session = gradients(case, backend, **options)
    one, = [launched.config for launched in session.launches if hasattr(launched.config, "publisher")]
    assert one.walk.cut == bool(prescribed.get("segment_chunks"))
    return found, expected, session


def assert_what_was_saved_gives_the_same_bits(words, backend, force, **apart):
    """Whatever a forward saved, in one grid and (prescribed by `apart`, too) in two kernels."""
    case = Call(REVERSE, words).case()
    found = {}
    for form in (REVERSE, TWO_KERNELS._replace(chunks=0, **apart)):
        force(**form.forced | TWO)
        for keep in (True, "states"):
            with capture(arch=backend, strict=True, schedule=2, early=True) as session:
                saved = kda.chunk_kda_fwd(**case.keywords, disable_recompute=keep, backend=backend).saved
                grads = kda.chunk_kda_bwd(do=case.do, dht=case.dht, **case.keywords, saved=saved, backend=backend)
            assert_nothing_found(session)
            found[form, keep] = {name: x for name, x in grads._asdict().items() if x is not None}
    expected, *others = found.values()
    for other in others:
        assert_the_same(other, expected)
