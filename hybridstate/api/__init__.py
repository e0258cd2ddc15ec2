"""The verbs, each as the list of its stages. No mathematics, no printing: read this room first."""

from hybridstate.api.analysis import analyze as analyze
from hybridstate.api.analysis import inspect as inspect
from hybridstate.api.analysis import validate_horizons as validate_horizons
from hybridstate.api.calibration import calibrate as calibrate
from hybridstate.api.calibration import calibrate_part as calibrate_part
from hybridstate.api.exchange import bench_exchange as bench_exchange
from hybridstate.api.export import export_plan as export_plan
from hybridstate.api.export import verify as verify
from hybridstate.api.quality import bench_quality as bench_quality
from hybridstate.api.serve import bench_serve as bench_serve
from hybridstate.bench.simulate_verb import bench_simulate as bench_simulate
from hybridstate.bench.verbs import bench_codecs as bench_codecs
from hybridstate.bench.verbs import bench_decode as bench_decode
from hybridstate.bench.verbs import bench_restore as bench_restore
from hybridstate.bench.verbs import bench_update as bench_update
