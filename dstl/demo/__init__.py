"""The main job: real flights through a stateful query, killed and recovered, compared with a plain computation."""
