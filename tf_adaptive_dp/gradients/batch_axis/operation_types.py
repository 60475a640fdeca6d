"""Types of operations, grouped by what they do to axes and to state."""

from __future__ import annotations

import tensorflow as tf

from tf_adaptive_dp._keras.graphs import BRANCHES, CALLS, LOOPS, static_value

# One entry of the output from one entry of each input, with broadcasting.
ELEMENTWISE = set(
    """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh
    BesselI0 BesselI0e BesselI1 BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Bucketize
    Cast Ceil CheckNumerics CheckNumericsV2 ClipByValue Complex ComplexAbs Conj Copy Cos Cosh
    DebugIdentityV2 Digamma Div DivNoNan Elu EluGrad EnsureShape Equal Erf Erfc Erfinv Exp Expm1
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Floor FloorDiv FloorMod Greater GreaterEqual
    Identity Igamma IgammaGradA Igammac Imag Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu
    LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum
    Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma Pow PreventGradient
    Print PrintV2  Real
    RealDiv Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6 Relu6Grad ReluGrad
    RightShift Rint Round Rsqrt
    RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad
    Softsign SoftsignGrad Spence Sqrt SqrtGrad Square SquaredDifference StaticRegexFullMatch
    StaticRegexReplace StopGradient StringLength StringLower StringStrip StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Sub Tan Tanh TanhGrad TruncateDiv
    TruncateMod Xdivy
    Xlog1py Xlogy ZerosLike Zeta
    """.split()
)

# The batch is among the leading axes. The operation works on this many trailing axes as a whole.
TRAILING = {
    **dict.fromkeys("Softmax LogSoftmax TopK TopKV2 NthElement HSVToRGB RGBToHSV".split(), 1),
    **dict.fromkeys("FFT IFFT RFFT IRFFT MatrixDiag MatrixDiagV2 MatrixDiagV3".split(), 1),
    **dict.fromkeys("FFT2D IFFT2D RFFT2D IRFFT2D Cholesky MatrixInverse MatrixSolve".split(), 2),
    **dict.fromkeys(
        "MatrixTriangularSolve MatrixSolveLs MatrixDeterminant MatrixExponential".split(), 2
    ),
    **dict.fromkeys(
        "LogMatrixDeterminant MatrixSquareRoot MatrixBandPart MatrixDiagPart".split(), 2
    ),
    **dict.fromkeys("MatrixDiagPartV2 MatrixDiagPartV3 MatrixSetDiag MatrixSetDiagV2".split(), 2),
    **dict.fromkeys("MatrixSetDiagV3 SelfAdjointEigV2 Svd Qr Lu BandedTriangularSolve".split(), 2),
    **dict.fromkeys("TridiagonalSolve TridiagonalMatMul".split(), 2),
    **dict.fromkeys("AdjustContrastv2 AdjustHue AdjustSaturation FFT3D IFFT3D".split(), 3),
}


def trailing_axes(op: tf.Operation) -> int:
    """The number of trailing axes on which an operation of `TRAILING` works as a whole."""
    if op.type in ("MatrixDiagV2", "MatrixDiagV3"):
        diagonals = static_value(op.inputs[1])
        if diagonals is None or diagonals.size > 1:
            return 2  # the rows of its input are the diagonals of a band
    return TRAILING[op.type]


# Axis 0 is the batch, in the first input and in all others that depend on the data.
AXIS_0 = set(
    """
    AvgPool AvgPool3D Conv2D Conv3D DepthToSpace DepthwiseConv2dNative
    Dilation2D ExtractImagePatches ExtractVolumePatches
    ImageProjectiveTransformV2 ImageProjectiveTransformV3 InTopK InTopKV2 LRN MaxPool MaxPool3D
    MaxPoolV2 MaxPoolWithArgmax Multinomial ResizeArea ResizeBicubic ResizeBilinear
    ResizeNearestNeighbor SoftmaxCrossEntropyWithLogits SpaceToDepth
    SparseSoftmaxCrossEntropyWithLogits
    """.split()
)

# Products of tensors, see `product_terms`.
PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"})

# Additions of tensors; operations that keep what is added; and multiplications by a factor.
SUMS = frozenset({"Add", "AddN", "AddV2", "Sub"})
UNCHANGED = frozenset({"Cast", "EnsureShape", "ExpandDims", "Identity", "Reshape", "Squeeze"})
SCALINGS = frozenset({"DivNoNan", "Mul", "RealDiv"})

REDUCTIONS = {"All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"}
# They reduce the rows that have the same segment id; the ids are their second input.
SEGMENTS = {
    *"SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd".split(),
    *"SegmentProdV2 SegmentSum SegmentSumV2 UnsortedSegmentMax UnsortedSegmentMin".split(),
    *"UnsortedSegmentProd UnsortedSegmentSum".split(),
}

# Only the shape of the input matters.
SHAPE_ONLY = {"Shape", "ShapeN", "Size", "Rank"}

# The sizes of the output are computed from those of the inputs, whatever these hold.
_SIZES_OF_INPUTS = ELEMENTWISE | set(TRAILING) | AXIS_0 | REDUCTIONS | PRODUCTS
_SIZES_OF_INPUTS |= set(
    """
    BiasAdd ConcatV2 Cumsum ExpandDims Gather GatherNd GatherV2 IdentityN OneHot Pack
    ReadVariableOp ResourceGather ResourceGatherNd
    ReverseSequence ReverseV2 Select Split SplitV Squeeze Transpose Unpack
    """.split()
)
# The same of the first input; what the others hold determines the sizes, too.
_SIZES_OF_FIRST = {
    *("BroadcastTo", "MirrorPad", "Pad", "PadV2", "Reshape", "Slice", "StridedSlice", "Tile"),
}


def holds_sizes(op: tf.Operation) -> list[tuple[tf.Tensor, bool]]:
    """What the sizes of an operation's outputs depend on.

    Returns:
      Inputs, each with whether only its own sizes matter, and not what it holds. Nothing may be
      known of an operation: then all that its inputs hold matters.
    """
    if op.type in SHAPE_ONLY:
        return []  # they have one entry for each axis
    if op.type in _SIZES_OF_FIRST:
        return [(t, k == 0) for k, t in enumerate(op.inputs)]
    return [(t, op.type in _SIZES_OF_INPUTS) for t in op.inputs]


RANDOM = {
    "ParameterizedTruncatedNormal",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "StatelessRandomNormal",
    "StatelessRandomNormalV2",
    "StatelessRandomUniform",
    "StatelessRandomUniformFullInt",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformV2",
    "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2",
    "TruncatedNormal",
}

# Not elementwise, but the output has the shape of the first input.
KEEP_SHAPE = {
    "BiasAdd",
    "Cumsum",
    "FusedBatchNormGradV3",
    "FusedBatchNormV3",
    "LogSoftmax",
    "ReverseSequence",
    "ReverseV2",
    "Softmax",
}

# They return elements of a data set.
ELEMENTS = {"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue"}

VARIABLE_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}

# TensorFlow declares them stateful. But they change nothing, and return the same for the same
# inputs until something else writes to what they read.
REPEATABLE = VARIABLE_READS | {
    "Assert",
    "LookupTableFindV2",
    "Print",
    "PrintV2",
    "VariableShape",
}

# Operations that take a handle and write nothing. All others with a handle may write.
READERS = set(
    """
    IteratorGetNextAsOptional LookupTableExportV2 LookupTableFindV2 LookupTableSizeV2
    ReadVariableOp ReadVariableXlaSplitND ResourceGather ResourceGatherNd TensorArrayGatherV3
    TensorArrayReadV3 TensorArraySizeV3 VarIsInitializedOp VariableShape _ReadVariablesOp
    """.split()
)

# TensorFlow declares them stateful, but they keep no data: checks, output that nothing reads back,
# random numbers, clocks, and operations that create handles.
WITHOUT_MEMORY = set(
    """
    AllCandidateSampler Assert CheckNumerics CheckNumericsV2 CrossReplicaSum CudnnRNN
    CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3
    DebugIdentityV2 DebugIdentityV3 DeepCopy DeviceIndex Empty FixedUnigramCandidateSampler
    GuaranteeConst LearnedUnigramCandidateSampler LogUniformCandidateSampler Multinomial
    NonDeterministicInts Print PrintV2 RandomCrop RandomGamma RandomPoisson RandomPoissonV2
    RandomShuffle SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 StatelessRandomGetAlg
    SyncDevice ThreadUnsafeUnigramCandidateSampler Timestamp UniformCandidateSampler VarHandleOp
    """.split()
)

# Communication between replicas, by the start of the name.
COMMUNICATION = ("AllToAll", "Collective", "Nccl")

# Data leaves the graph, or comes back into it; no one can see what is kept outside.
OUTSIDE = {
    *("EagerPyFunc", "PyFunc", "PyFuncStateless", "ReadFile", "WriteFile", "MatchingFiles"),
    *("DatasetToTFRecord", "ExperimentalDatasetToTFRecord"),
    *("SaveDataset", "SaveDatasetV2", "LoadDataset"),
}

FUNCTIONS = CALLS | BRANCHES | LOOPS

# The list may become, or stay, as long as the batch.
KEEP_LENGTH = {"TensorListReserve", "TensorListSetItem", "TensorListStack"}
LISTS = KEEP_LENGTH | {
    "TensorListFromTensor",
    "TensorListGather",
    "TensorListGetItem",
    "TensorListPopBack",
    "TensorListPushBack",
    "TensorListResize",
}


def product_terms(op: tf.Operation) -> tuple[list[str], str]:
    """Writes a product of tensors as `tf.einsum` would: letters of each input and the output."""
    if op.type == "Einsum":
        return _einsum_terms(op)
    names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    ranks = [t.shape.rank for t in op.inputs]
    stack = "abcdefgh"[: max(ranks) - 2]
    terms = [
        stack[len(stack) - (rank - 2) :] + (last[::-1] if op.get_attr(flip) else last)
        for rank, last, flip in zip(ranks, ("nk", "km"), names)
    ]
    return terms, stack + "nm"


def broadcast_terms(op: tf.Operation) -> set[str]:
    """The letters of `product_terms` along which an input of length 1 is repeated."""
    terms, result = product_terms(op)
    if op.type != "Einsum":
        return set(result[:-2])
    return set().union(*terms) - set(op.get_attr("equation").decode())  # those of an ellipsis


def _einsum_terms(op: tf.Operation) -> tuple[list[str], str]:
    """The letters of an equation, with ellipses spelled out."""
    equation = op.get_attr("equation").decode().replace(" ", "")
    left, result = equation.split("->")
    terms = left.split(",")
    unused = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    hidden = [
        t.shape.rank - len(term) + 3 if "..." in term else 0 for t, term in zip(op.inputs, terms)
    ]
    letters = unused[: max(hidden)]
    terms = [
        term.replace("...", "".join(letters[len(letters) - count :]))
        for term, count in zip(terms, hidden)
    ]
    return terms, result.replace("...", "".join(letters))
