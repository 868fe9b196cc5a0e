// microbatch.h: the test of a step in micro-batches, which network.cu runs on the CPU and kernels.cu on a GPU.
#pragma once

static Config microbatch_config(int microbatch) {
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
    config.microbatch = microbatch;
    return config;
}

// Makes a model whose weights are not as initialised, because nearly every gradient would be zero, and seven random
// images. What the gradients' memory holds is NaN.
static void prepare_trainer(Trainer* t, const Config& config) {
    Model* m = &t->model;
    *m = plan_model(config, microbatch_size(config), true);
    allocate_model(m);
    initialise_weights(m, 1);

    std::vector<float> weights(m->plan.num_floats);
    backend_download(weights.data(), m->master, weights.size() * sizeof(float));
    for (size_t i = 0; i < weights.size(); i++) {
        float normal[4];
        random_normals(normal, 1, STREAM_PERTURB, (uint32_t)i, 0, 0);
        weights[i] += 0.02f * normal[0];
    }
    backend_upload(m->master, weights.data(), weights.size() * sizeof(float));
    use_weights(m, m->master);

    t->images.count = 7;
    t->images.bytes.resize((size_t)7 * 3 * 16 * 16);
    for (size_t i = 0; i < t->images.bytes.size(); i++)
        t->images.bytes[i] = (uint8_t)random_word(2, STREAM_PERTURB, (uint32_t)i, 0, 0);
    prepare_steps(t);

    std::vector<float> garbage(weights.size(), NAN);
    backend_upload(m->gradients, garbage.data(), garbage.size() * sizeof(float));
}

// Returns whether the gradient of five images is the sum of theirs in pairs, bit for bit, whatever the order of time.
// *orders_differ tells whether the sum from left to right is another, without which the comparison would say nothing.
static bool sums_in_pairs(Trainer* t, bool* orders_differ) {
    Model* m = &t->model;
    std::vector<MicroBatch> parts = own_microbatches(m, OBJECTIVE_IMAGES);
    std::span<const MicroBatch> all = parts;
    auto gradient_of = [&](std::span<const MicroBatch> some) {
        tree_gradient(t, OBJECTIVE_IMAGES, some, m->gradients);
        std::vector<float> gradient(m->plan.num_floats);
        backend_download(gradient.data(), m->gradients, gradient.size() * sizeof(float));
        return gradient;
    };

    std::vector<float> of[5];
    for (int part = 0; part < 5; part++) of[part] = gradient_of(all.subspan(part, 1));
    std::vector<float> whole = gradient_of(all);

    bool pairwise = true;
    for (size_t i = 0; i < whole.size(); i++) {
        float in_pairs = (of[0][i] + of[1][i]) + (of[2][i] + (of[3][i] + of[4][i]));
        float in_turn = (((of[0][i] + of[1][i]) + of[2][i]) + of[3][i]) + of[4][i];
        pairwise &= whole[i] == in_pairs;
        *orders_differ |= in_pairs != in_turn;
    }
    return pairwise;
}

// Takes three steps of five images: all at once, in parts of 2, 2 and 1, and one by one. On a GPU the first step is
// run, the second recorded, and the third replayed. Losses, quartiles and gradients must be the same within `limit`,
// and smaller parts must take less memory.
static void test_microbatch(double limit) {
    double losses = 0, gradients = 0, quartiles = 0;  // the largest errors
    StepState whole = StepState();                    // of all images at once
    std::vector<double> whole_gradient;
    size_t activations = 0;  // bytes, of the parts before
    bool same_counts = true, less_memory = true;
    bool pairwise = true, orders_differ = false;

    for (int microbatch : {0, 2, 1}) {  // 0: all at once
        Trainer t;
        Model* m = &t.model;
        prepare_trainer(&t, microbatch_config(microbatch));

        StepState last = StepState();
        for (int step = 0; step < 3; step++) {
            begin_next_step(&t);
            last = await_step(&t);
        }
        std::vector<float> gradient(m->plan.num_floats);
        backend_download(gradient.data(), m->gradients, gradient.size() * sizeof(float));

        if (microbatch == 0) {
            whole = last;
            whole_gradient.assign(gradient.begin(), gradient.end());
        } else {
            std::vector<double> whole_quartiles(whole.quartile_sums, whole.quartile_sums + 4);
            keep_worse(&losses, fabs(last.loss / whole.loss - 1));
            keep_worse(&gradients, error_of(gradient.data(), whole_gradient.data(), gradient.size()));
            keep_worse(&quartiles, error_of(last.quartile_sums, whole_quartiles.data(), 4));
            for (int q = 0; q < 4; q++) same_counts &= last.quartile_counts[q] == whole.quartile_counts[q];
            less_memory &= m->plan.arena_bytes < activations;
        }
        activations = m->plan.arena_bytes;

        if (microbatch == 1) pairwise = sums_in_pairs(&t, &orders_differ);
    }

    report(pairwise && orders_differ, "sum of five parts", "in pairs, bit for bit");
    bool same = same_counts && losses < limit && gradients < limit && quartiles < limit;
    report(less_memory && same && whole.step == 3, "micro-batches of a step",
           "losses %.2g apart, quartiles %.2g, gradients %.2g", losses, quartiles, gradients);
}
