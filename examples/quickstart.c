/* The same from C: create a layer from a checkpoint, ask for its workspace, run it.   quickstart_c data/tiny-dsv3 1 */
#include <sluice/c_api.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char** argv) {
  sluice_context* context = NULL;
  sluice_layer* layer = NULL;
  sluice_options options;
  sluice_tensor x = {0}, out = {0};
  int64_t T = 4, H = 0, i;
  void* workspace = NULL;
  int failed = 1;

  if (argc != 3) {
    fprintf(stderr, "usage: quickstart_c MODEL LAYER\n");
    return 2;
  }
  if (sluice_context_create(&context) != SLUICE_OK) return 1;
  SLUICE_INIT(options);
  options.precision = SLUICE_PRECISION_F32;
  options.max_tokens = T;
  if (sluice_layer_create_from_checkpoint(context, argv[1], atoll(argv[2]), &options, &layer) != SLUICE_OK) goto done;
  sluice_layer_sizes(layer, &H, NULL, NULL, NULL);

  workspace = malloc((size_t)sluice_layer_workspace_bytes(layer));
  x.data = malloc((size_t)(T * H) * sizeof(float));   /* [T,H] */
  out.data = malloc((size_t)(T * H) * sizeof(float)); /* [T,H] */
  if (workspace == NULL || x.data == NULL || out.data == NULL) goto done;
  x.dtype = out.dtype = SLUICE_F32;
  x.rank = out.rank = 2;
  x.shape[0] = out.shape[0] = T;
  x.shape[1] = out.shape[1] = H; /* strides 0: dense */
  for (i = 0; i < T * H; ++i) ((float*)x.data)[i] = 0.5f;

  if (sluice_layer_forward(context, layer, &x, &out, NULL, NULL, NULL, workspace,
                           (size_t)sluice_layer_workspace_bytes(layer)) != SLUICE_OK) {
    goto done;
  }
  for (i = 0; i < 4 && i < H; ++i) printf("out[0,%d] = %g\n", (int)i, ((float*)out.data)[i]);
  failed = 0;

done:
  if (failed) fprintf(stderr, "quickstart_c: %s\n", sluice_last_error(context));
  free(out.data);
  free(x.data);
  free(workspace);
  sluice_layer_destroy(layer);
  sluice_context_destroy(context);
  return failed;
}
