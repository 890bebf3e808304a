"""One case for each CEL rule of the CRD: a valid base object and single changes that pass or are refused.

A rule that stands at several places (names, sources, checksums, sizes, prices, roles) has a case for each place.
"""

from __future__ import annotations

from tests.cluster.crd.rules_base import Rule
from tests.cluster.crd.rules_model import MODEL
from tests.cluster.crd.rules_names import NAMES
from tests.cluster.crd.rules_rest import ROLLOUT_AND_TEMPLATE, SCALING, SCHEDULING
from tests.cluster.crd.rules_spec import METADATA_AND_SPEC

RULES = [*METADATA_AND_SPEC, *MODEL, *NAMES, *SCHEDULING, *SCALING, *ROLLOUT_AND_TEMPLATE]
__all__ = ["RULES", "Rule"]
