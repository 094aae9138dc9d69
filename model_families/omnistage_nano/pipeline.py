"""omnistage-nano: the graph of the omni families."""

from __future__ import annotations

from model_families.graphs import omni_pipeline

PIPELINE = omni_pipeline("omnistage_nano", speaks=True)
SILENT_PIPELINE = omni_pipeline("omnistage_nano", speaks=False)
