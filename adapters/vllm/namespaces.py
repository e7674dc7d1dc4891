"""Namespaces of one rank's requests, by weights, adapter and tenant."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from kvkit.adapters.engine.lookup_request import Sequence
from kvkit.adapters.vllm.loras import Loras
from kvkit.format.layout import Namespace
from kvkit.transfer.sequence import UnknownModel


class Namespaces:
    """The namespaces of one rank; the model's weights may change.

    `named` is for any thread, the rest for the thread that runs steps.

    Args:
        base: namespace of the weights that the engine began with, without adapter and salt.
        served: names of the base model in requests, if these may name adapters, too; None: any name.
        loras: adapters of this worker; None: it has none.

    Attributes:
        current: namespace of the present weights.
        stale: True if the weights changed after `current` began: no KV is looked up, stored or sent.
        asleep: True while vLLM's pages have no memory: no KV is looked up, stored or sent.
    """

    def __init__(self, base: Namespace, served: Collection[str] | None, loras: Loras | None) -> None:
        self._base = self.current = base
        self._served = served
        self._loras = loras
        self._adapters: dict[str, str] = {}  # identities, by the adapters' names in requests
        self.stale = self.asleep = False

    def begin_epoch(self, epoch: str) -> None:
        """Begin the namespace of an epoch. It differs from those of other epochs."""
        self.current = replace(self._base, revision=f"{self._base.revision}#{epoch}")
        self.stale = False

    def of(self, sequence: Sequence) -> Namespace | None:
        """Return a sequence's namespace; None if no KV of it is to be looked up, stored or sent."""
        if self.stale or self.asleep:
            return None
        if sequence.lora is None:
            return replace(self.current, salt=sequence.salt)
        adapter = None if self._loras is None else self._loras.identity(sequence.lora)
        if adapter is None:
            self._adapters.pop(sequence.lora.name, None)
            return None
        self._adapters[sequence.lora.name] = adapter
        return replace(self.current, lora=adapter, salt=sequence.salt)

    def named(self, model: str | None, salt: str) -> Namespace:
        """Return the namespace of requests with this model name (None: the base model) and cache salt.

        An adapter is known once a request has named it: its files are read then.

        Raises:
            UnknownModel: `model` is neither the base model nor an adapter that a request has named.
        """
        lora = self._adapters.get(model or "", "")
        if not (lora or model is None or self._served is None or model in self._served):
            raise UnknownModel(f"model = {model!r}: neither served nor an adapter that any request has named")
        return replace(self.current, lora=lora, salt=salt)
