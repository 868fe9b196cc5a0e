// microbatch.h: a step in micro-batches, which network.cu tests on the CPU and kernels.cu on a GPU.
#pragma once

// Three steps (on a GPU the first is run, the second recorded, the third replayed) of five images at once, in
// parts of 2, 2 and 1, and one by one: the same losses, quartiles and gradients to `limit`, in less memory.
static void test_microbatch(double limit) {
    Config config = default_config();
    for (auto [name, value] : {std::pair<const char*, const char*>{"image_size", "16"},
                               {"num_channels", "32"},
                               {"channel_mult", "1,2"},
                               {"num_res_blocks", "1"},
                               {"attention_resolutions", "8"},
                               {"num_head_channels", "16"},
                               {"norm_groups", "8"},
                               {"batch_size", "5"},
                               {"min_snr_gamma", "5"},
                               {"lr", "0"}})
        set_flag(&config, flag_named(name), value);
    double losses = 0, gradients = 0, quartiles = 0;
    std::vector<double> whole_gradient;
    StepState whole = StepState();
    size_t activations = 0;
    bool less = true, pairwise = true, orders_differ = false;
    for (int microbatch : {0, 2, 1}) {
        Trainer t;
        Model* m = &t.model;
        config.microbatch = microbatch;
        *m = plan_model(config, microbatch_size(config), true);
        allocate_model(m);
        initialise_weights(m, 1);
        std::vector<float> values(m->plan.num_floats);
        backend_download(values.data(), m->master, values.size() * sizeof(float));
        for (size_t i = 0; i < values.size(); i++) {  // as initialised, nearly every gradient is zero
            float normal[4];
            random_normals(normal, 1, STREAM_PERTURB, (uint32_t)i, 0, 0);
            values[i] += 0.02f * normal[0];
        }
        backend_upload(m->master, values.data(), values.size() * sizeof(float));
        use_weights(m, m->master);
        t.images.count = 7, t.images.bytes.resize((size_t)7 * 3 * 16 * 16);
        for (size_t i = 0; i < t.images.bytes.size(); i++)
            t.images.bytes[i] = (uint8_t)random_word(2, STREAM_PERTURB, (uint32_t)i, 0, 0);
        prepare_steps(&t);
        std::vector<float> garbage(values.size(), NAN);
        backend_upload(m->gradients, garbage.data(), garbage.size() * sizeof(float));
        StepState last = StepState();
        for (int step = 0; step < 3; step++) begin_next_step(&t), last = await_step(&t);
        backend_download(values.data(), m->gradients, values.size() * sizeof(float));
        if (!microbatch) {
            whole = last, activations = m->plan.arena_bytes;
            whole_gradient.assign(values.begin(), values.end());
        } else {
            auto worse = [](double* worst, double error) {
                *worst = worsens(error, *worst) ? error : *worst;
            };
            worse(&losses, fabs(last.loss / whole.loss - 1));
            worse(&gradients, error_of(values.data(), whole_gradient.data(), values.size()));
            std::vector<double> sums(whole.quartile_sums, whole.quartile_sums + 4);
            worse(&quartiles, error_of(last.quartile_sums, sums.data(), 4));
            for (int q = 0; q < 4; q++) less &= last.quartile_counts[q] == whole.quartile_counts[q];
            less &= m->plan.arena_bytes < activations, activations = m->plan.arena_bytes;
        }
        if (microbatch == 1) {         // halves before the whole, whatever the order of time
            std::vector<float> of[6];  // each part's, then that of all five
            std::vector<MicroBatch> parts = own_microbatches(m, OBJECTIVE_IMAGES);
            for (int part = 0; part <= 5; part++) {
                std::span<const MicroBatch> all = parts;
                tree_gradient(&t, OBJECTIVE_IMAGES, part < 5 ? all.subspan(part, 1) : all, m->gradients);
                of[part].resize(values.size());
                backend_download(of[part].data(), m->gradients, values.size() * sizeof(float));
            }
            for (size_t i = 0; i < values.size(); i++) {
                float halves = (of[0][i] + of[1][i]) + (of[2][i] + (of[3][i] + of[4][i]));
                pairwise &= of[5][i] == halves;
                orders_differ |= halves != (((of[0][i] + of[1][i]) + of[2][i]) + of[3][i]) + of[4][i];
            }
        }
    }
    report(pairwise && orders_differ, "sum of five parts", "in pairs, bit for bit");
    report(less && losses < limit && gradients < limit && quartiles < limit && whole.step == 3,
           "micro-batches of a step", "losses %.2g apart, quartiles %.2g, gradients %.2g", losses, quartiles,
           gradients);
}
