/*
 * Transcodes a generated film by libavcodec and libswscale, frame by frame: drawn, encoded by the first encoder, decoded, scaled,
 * encoded by the second one. What the second encoder returns goes into a hash.
 */

#include <libavcodec/avcodec.h>
#include <libavutil/cpu.h>
#include <libavutil/imgutils.h>
#include <libavutil/opt.h>
#include <libswscale/swscale.h>
#include <stdint.h>
#include <stdlib.h>

struct film {
    unsigned seed;
    int frames, drawn;
    AVCodecContext *encoder, *decoder, *second;
    struct SwsContext *scaler;
    AVFrame *picture, *decoded, *scaled;
    AVPacket *packet, *result;
    uint64_t hash;
};

/* The encoders of a film, by its seed, with the format of their pictures. */
static const struct {
    enum AVCodecID first, second;
    enum AVPixelFormat scaled;
} kinds[] = {
    {AV_CODEC_ID_MPEG4, AV_CODEC_ID_FFV1, AV_PIX_FMT_YUV444P},
    {AV_CODEC_ID_MPEG2VIDEO, AV_CODEC_ID_MPEG4, AV_PIX_FMT_YUV420P},
    {AV_CODEC_ID_FFV1, AV_CODEC_ID_MPEG2VIDEO, AV_PIX_FMT_YUV420P},
    {AV_CODEC_ID_MPEG4, AV_CODEC_ID_HUFFYUV, AV_PIX_FMT_YUV422P},
};

static const int width = 176, height = 144;

static AVCodecContext *open_encoder(enum AVCodecID id, enum AVPixelFormat format, int w, int h,
                                    unsigned seed) {
    const AVCodec *codec = avcodec_find_encoder(id);
    AVCodecContext *context = codec ? avcodec_alloc_context3(codec) : NULL;
    if (!context)
        return NULL;
    context->width = w;
    context->height = h;
    context->pix_fmt = format;
    context->time_base = (AVRational){1, 25};
    context->framerate = (AVRational){25, 1};
    context->gop_size = 5 + (int)(seed % 7);
    context->bit_rate = 200000 + (int)(seed % 5) * 100000;
    /* Threads of the library itself, in half of the films. */
    context->thread_count = seed & 8 ? 2 : 1;
    context->thread_type = FF_THREAD_SLICE;
    context->flags |= AV_CODEC_FLAG_BITEXACT;
    return avcodec_open2(context, codec, NULL) == 0 ? context : NULL;
}

static AVFrame *new_picture(enum AVPixelFormat format, int w, int h) {
    AVFrame *frame = av_frame_alloc();
    if (!frame)
        return NULL;
    frame->format = format;
    frame->width = w;
    frame->height = h;
    return av_frame_get_buffer(frame, 0) == 0 ? frame : NULL;
}

__attribute__((visibility("default"))) struct film *film_open(unsigned seed, int frames);
__attribute__((visibility("default"))) int film_step(struct film *film);
__attribute__((visibility("default"))) uint64_t film_close(struct film *film);
__attribute__((visibility("default"))) void film_settings(int level, int cpu_flags);
__attribute__((visibility("default"))) int film_level(void);
__attribute__((visibility("default"))) int film_cpu_flags(void);

struct film *film_open(unsigned seed, int frames) {
    const unsigned kind = seed % 4;
    struct film *film = calloc(1, sizeof *film);
    if (!film)
        return NULL;
    film->seed = seed;
    film->frames = frames;
    film->hash = 0xcbf29ce484222325;
    film->encoder = open_encoder(kinds[kind].first, AV_PIX_FMT_YUV420P, width, height, seed);
    film->second = open_encoder(kinds[kind].second, kinds[kind].scaled, width / 2, height / 2, seed);
    const AVCodec *codec = avcodec_find_decoder(kinds[kind].first);
    film->decoder = codec ? avcodec_alloc_context3(codec) : NULL;
    if (!film->encoder || !film->second || !film->decoder)
        return NULL;
    film->decoder->thread_count = seed & 16 ? 2 : 1;
    film->decoder->flags |= AV_CODEC_FLAG_BITEXACT;
    film->decoder->width = width;
    film->decoder->height = height;
    film->decoder->extradata_size = film->encoder->extradata_size;
    film->decoder->extradata =
        av_mallocz((size_t)film->encoder->extradata_size + AV_INPUT_BUFFER_PADDING_SIZE);
    for (int at = 0; at < film->encoder->extradata_size; at++)
        film->decoder->extradata[at] = film->encoder->extradata[at];
    if (avcodec_open2(film->decoder, codec, NULL) != 0)
        return NULL;
    film->scaler =
        sws_getContext(width, height, AV_PIX_FMT_YUV420P, width / 2, height / 2, kinds[kind].scaled,
                       SWS_BICUBIC | SWS_ACCURATE_RND | SWS_BITEXACT, NULL, NULL, NULL);
    film->picture = new_picture(AV_PIX_FMT_YUV420P, width, height);
    film->scaled = new_picture(kinds[kind].scaled, width / 2, height / 2);
    film->decoded = av_frame_alloc();
    film->packet = av_packet_alloc();
    film->result = av_packet_alloc();
    return film->scaler && film->picture && film->scaled && film->decoded ? film : NULL;
}

static void draw(struct film *film) {
    AVFrame *picture = film->picture;
    const int time = film->drawn;
    for (int plane = 0; plane < 3; plane++) {
        const int w = plane ? width / 2 : width, h = plane ? height / 2 : height;
        for (int y = 0; y < h; y++)
            for (int x = 0; x < w; x++) {
                const unsigned square =
                    (unsigned)((x + 3 * time) / 16 + (y + time) / 16) * (film->seed * 2654435761U | 1);
                picture->data[plane][y * picture->linesize[plane] + x] =
                    (uint8_t)((square >> 24) + (unsigned)(plane * 37 + x + y * 2 + time));
            }
    }
    picture->pts = time;
    film->drawn++;
}

static void note(struct film *film, const uint8_t *bytes, int size) {
    for (int at = 0; at < size; at++)
        film->hash = (film->hash ^ bytes[at]) * 0x100000001b3;
}

/* Takes what the second encoder has; NULL ends it. */
static int encode_again(struct film *film, AVFrame *frame) {
    if (avcodec_send_frame(film->second, frame) < 0)
        return -1;
    while (avcodec_receive_packet(film->second, film->result) == 0) {
        note(film, film->result->data, film->result->size);
        av_packet_unref(film->result);
    }
    return 0;
}

static int decode(struct film *film, AVPacket *packet) {
    if (avcodec_send_packet(film->decoder, packet) < 0)
        return -1;
    while (avcodec_receive_frame(film->decoder, film->decoded) == 0) {
        if (av_frame_make_writable(film->scaled) < 0)
            return -1;
        sws_scale(film->scaler, (const uint8_t *const *)film->decoded->data, film->decoded->linesize, 0,
                  height, film->scaled->data, film->scaled->linesize);
        film->scaled->pts = film->decoded->pts != AV_NOPTS_VALUE ? film->decoded->pts : film->drawn;
        av_frame_unref(film->decoded);
        if (encode_again(film, film->scaled) < 0)
            return -1;
    }
    return 0;
}

static int encode(struct film *film, AVFrame *frame) {
    if (avcodec_send_frame(film->encoder, frame) < 0)
        return -1;
    while (avcodec_receive_packet(film->encoder, film->packet) == 0) {
        const int failed = decode(film, film->packet);
        av_packet_unref(film->packet);
        if (failed)
            return -1;
    }
    return 0;
}

/* Transcodes one more frame. Returns 1 if there are more, 0 at the end, -1 if the library fails. */
int film_step(struct film *film) {
    if (film->drawn < film->frames) {
        if (av_frame_make_writable(film->picture) < 0)
            return -1;
        draw(film);
        return encode(film, film->picture) < 0 ? -1 : 1;
    }
    return encode(film, NULL) < 0 || decode(film, NULL) < 0 || encode_again(film, NULL) < 0 ? -1 : 0;
}

uint64_t film_close(struct film *film) {
    const uint64_t hash = film->hash;
    avcodec_free_context(&film->encoder);
    avcodec_free_context(&film->decoder);
    avcodec_free_context(&film->second);
    sws_freeContext(film->scaler);
    av_frame_free(&film->picture);
    av_frame_free(&film->decoded);
    av_frame_free(&film->scaled);
    av_packet_free(&film->packet);
    av_packet_free(&film->result);
    free(film);
    return hash;
}

/* Settings that are variables of the library. */
void film_settings(int level, int cpu_flags) {
    av_log_set_level(level);
    av_force_cpu_flags(cpu_flags);
}

int film_level(void) { return av_log_get_level(); }

int film_cpu_flags(void) { return av_get_cpu_flags(); }
