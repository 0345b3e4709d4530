package api

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// volumeHandlers serve the routes of named volumes.
type volumeHandlers struct {
	volumes Volumes
	offer   *spec.Offer
	log     *slog.Logger
}

// show is spec.Volume, and how much is in it.
func (h *volumeHandlers) show(v record.VolumeInfo) wire.Volume {
	out := spec.Volume(v)
	n, err := h.volumes.Usage(v.ID)
	if err == nil {
		out.UsedBytes = &n
	} else if !errs.Is(err, errs.Unsupported) {
		h.log.Warn("cannot measure a volume", "volume", v.Name, "err", err)
	}
	return out
}

func (h *volumeHandlers) list(w http.ResponseWriter, r *http.Request) error {
	all, err := h.volumes.List(r.Context())
	if err != nil {
		return err
	}
	out := wire.VolumeList{Items: []wire.Volume{}}
	for _, v := range all {
		out.Items = append(out.Items, h.show(v))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (h *volumeHandlers) create(w http.ResponseWriter, r *http.Request) error {
	var req wire.VolumeRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := spec.CheckVolumeName(req.Name, "name"); err != nil {
		return err
	}
	bytes, err := h.offer.VolumeSize(req.Size, "size")
	if err != nil {
		return err
	}
	v, err := h.volumes.Create(r.Context(), req.Name, bytes)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, h.show(v))
	return nil
}

func (h *volumeHandlers) inspect(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	v, err := h.volumes.Get(r.Context(), httperr.Clip(name, spec.MaxVolumeName+1))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, h.show(v))
	return nil
}

func (h *volumeHandlers) remove(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	// A client that hangs up during a delete has still asked for it.
	if err := h.volumes.Delete(context.WithoutCancel(r.Context()), cmp.Or(httperr.Clip(name, spec.MaxVolumeName+1), "-")); err != nil {
		return err
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

// prune removes volumes that no sandbox has mounted, as docker does: named ones only with
// ?all=true. All volumes of sandboxd have names, so without it nothing goes.
func (h *volumeHandlers) prune(w http.ResponseWriter, r *http.Request) error {
	all, err := spec.ParseBool(cmp.Or(r.URL.Query().Get("all"), "false"))
	if err != nil {
		return httperr.Invalid("all: want true or false")
	}
	gone := []string{}
	if all {
		names, err := h.volumes.Prune(context.WithoutCancel(r.Context()))
		if err != nil {
			return err
		}
		gone = append(gone, names...)
	}
	writeJSON(w, http.StatusOK, wire.VolumePruneReport{Volumes: gone})
	return nil
}
