"""The namespaces of one rank's requests: of which weights, adapter and tenant their KV is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvkit.adapters.engine.lookup_request import Sequence
from kvkit.adapters.vllm.loras import Loras
from kvkit.format.layout import Namespace
from kvkit.moving.sequence import UnknownModel


class Namespaces:
    """Those of an engine whose weights may change. `named` is for any thread, the rest for that of steps.

    Args:
        base: of the weights that the engine began with, without adapter and salt.
        served: what requests call the base model, where they may name adapters, too; None: it has any name.
        loras: the adapters of this worker; None where there are none.

    Attributes:
        current: of the weights that the model has.
        stale: the weights have changed since `current` was begun: no KV is looked up, stored or sent.
        asleep: vLLM's pages have no memory: likewise.
    """

    def __init__(self, base: Namespace, served: Collection[str] | None, loras: Loras | None) -> None:
        self._base = self.current = base
        self._served = served
        self._loras = loras
        self._adapters: dict[str, str] = {}  # what they hold, by the name that requests have for them
        self.stale = self.asleep = False

    def begin(self, epoch: str) -> None:
        """Tell KV from now on apart from that of before. Mutates."""
        self.current = replace(self._base, revision=f"{self._base.revision}#{epoch}")
        self.stale = False

    def of(self, sequence: Sequence) -> Namespace | None:
        """Return that of a sequence; None where none of it is to be looked up, stored or sent."""
        if self.stale or self.asleep:
            return None
        if sequence.lora is None:
            return replace(self.current, salt=sequence.salt)
        known = None if self._loras is None else self._loras.identity(sequence.lora)
        if known is None:
            self._adapters.pop(sequence.lora.name, None)
            return None
        self._adapters[sequence.lora.name] = known
        return replace(self.current, lora=known, salt=sequence.salt)

    def named(self, model: str | None, salt: str) -> Namespace:
        """Return that of requests with that model's name (None: the base model) and cache salt.

        An adapter is known once a request has named it: what it holds is read then.

        Raises:
            UnknownModel: none has, and it is not the base model.
        """
        lora = self._adapters.get(model or "", "")
        if not (lora or model is None or self._served is None or model in self._served):
            raise UnknownModel(f"model = {model!r}: neither served nor an adapter that any request has had")
        return replace(self.current, lora=lora, salt=salt)
