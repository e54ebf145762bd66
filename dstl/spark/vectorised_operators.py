"""The vectorised half of :class:`~dstl.spark.StateBackend`: aggregates, and functions over states."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dstl.spark.arguments import column_names
from dstl.spark.key_groups import KEY_GROUP_COLUMN, key_group_column
from dstl.spark.operators import Operators, observed
from dstl.spark.vectorised_task import VectorisedDefinition, define_aggregate, define_map_states
from dstl.state.vectorised.keyed_functions import Aggregate, StatesFunction

__all__ = ["VectorisedOperators"]


class VectorisedOperators(Operators):
    """What a backend offers beside stateful processors; the backend is its only subclass."""

    def aggregate(
        self,
        df: DataFrame,
        *,
        by: str | Sequence[str],
        name: str | None = None,
        parallelism: int | None = None,
        ttl_ms: int | None = None,
        **aggregates: Aggregate,
    ) -> DataFrame:
        """Aggregate the rows of each key over all micro-batches, as ``groupBy(by).agg(...)`` does.

        ::

            backend.aggregate(df, by="sensor", n=count(), total=sum("value"), latest=last("value"))

        Output mode update: each micro-batch yields the new aggregates of the keys that occurred in it. Watermarks play
        no part: a grouping column with one, and a session window, is refused.

        Args:
            df: A streaming DataFrame.
            by: Grouping column or columns. A null is a key like any other.
            name: The operator's name; see :meth:`transform_with_state`.
            parallelism: Partitions; by default the backend's.
            ttl_ms: Milliseconds of processing time after a key's last row at which its aggregates are gone; by default
                they live for ever.
            aggregates: What to compute, by the name of the output column (not ``df``, ``by``, ``name``,
                ``parallelism`` or ``ttl_ms``). They may be added and removed at a restart; one that is new, or was
                gone, starts from nothing.

        Returns:
            A streaming DataFrame of the grouping columns and the aggregates.

        Raises:
            Invalid: A column does not exist, its type cannot be aggregated so, or a name is taken: refused here, not in
                a task.
        """
        uid, partitions = self._next_operator(name, parallelism)
        definition = define_aggregate(
            df,
            uid=uid,
            by=column_names(by, f"operator {uid!r}"),
            aggregates=aggregates,
            parallelism=partitions,
            max_parallelism=self.max_parallelism,
            ttl_ms=ttl_ms,
        )
        return self._vectorise(df, definition)

    def map_states(
        self,
        df: DataFrame,
        *,
        by: str | Sequence[str],
        state: StructType | str,
        output: StructType | str,
        function: StatesFunction,
        name: str | None = None,
        parallelism: int | None = None,
        ttl_ms: int | None = None,
    ) -> DataFrame:
        """Update the states of many keys at once with a function over Arrow tables.

        ``function(rows, keys, states)`` returns ``(new_states, output)``, where all are ``pyarrow.Table`` s:

        - ``rows``: the input's columns, and ``__group``, which says which row of ``keys`` each row belongs to. Rows of
          one key stand in the order in which they came.
        - ``keys``: the grouping columns of the distinct keys, each once.
        - ``states``: for each row of ``keys`` its prior state, and ``__exists``: False (and nulls) where it has none.
        - ``new_states``: one row for each row of ``keys``, in their order, with the state's columns, matched by name.
          With a boolean column ``__exists``, False removes the key's state. Unchanged states cost nothing. None leaves
          all states as they are.
        - ``output``: any rows of the output schema, matched by name, or None.

        It is called about once per partition and micro-batch; more often where a partition has millions of rows. A key
        is in one call of a micro-batch only, with all its rows.

        Args:
            df: A streaming DataFrame.
            by: Grouping column or columns. A null is a key like any other.
            state: Columns of a key's state. At a restart they can be removed, reordered and widened, and columns that
                may be null can be added.
            output: Columns of the output.
            function: The function; it is shipped to the workers.
            name: The operator's name; see :meth:`transform_with_state`.
            parallelism: Partitions; by default the backend's.
            ttl_ms: Milliseconds of processing time at which a state is gone that no call has returned since. Every
                returned state is then written, changed or not. By default states live for ever.

        Returns:
            A streaming DataFrame that any sink can write.

        Raises:
            Invalid: A column does not exist, a type is not supported, a name is taken, or the function does not take
                three arguments: refused here, not in a task.
        """
        uid, partitions = self._next_operator(name, parallelism)
        definition = define_map_states(
            df,
            uid=uid,
            by=column_names(by, f"operator {uid!r}"),
            state=state,
            output=output,
            function=function,
            parallelism=partitions,
            max_parallelism=self.max_parallelism,
            ttl_ms=ttl_ms,
        )
        return self._vectorise(df, definition)

    def _vectorise(self, df: DataFrame, definition: VectorisedDefinition) -> DataFrame:
        self._add(definition)
        needed = observed(df, definition.uid).select([F.col(f"`{name}`") for name in definition.input_schema.names])
        key_group = key_group_column(definition.by, self.max_parallelism)
        return self._placed(needed.withColumn(KEY_GROUP_COLUMN, key_group), definition)
