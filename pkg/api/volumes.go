package api

import (
	"cmp"
	"context"
	"net/http"

	"github.com/sandboxd/sandboxd/pkg/api/spec"
	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/api/wire/httperr"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

func (s *Server) toWireVolume(v record.VolumeInfo) wire.Volume {
	out := spec.Volume(v)
	n, err := s.cfg.Volumes.Usage(v.ID)
	if err == nil {
		out.UsedBytes = &n
	} else if !errs.Is(err, errs.Unsupported) {
		s.cfg.Log.Warn("a volume can not be measured", "volume", v.Name, "err", err)
	}
	return out
}

func (s *Server) listVolumes(w http.ResponseWriter, r *http.Request) error {
	all, err := s.cfg.Volumes.List(r.Context())
	if err != nil {
		return err
	}
	out := wire.VolumeList{Items: []wire.Volume{}}
	for _, v := range all {
		out.Items = append(out.Items, s.toWireVolume(v))
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

func (s *Server) createVolume(w http.ResponseWriter, r *http.Request) error {
	var req wire.VolumeRequest
	if err := decode(w, r, &req); err != nil {
		return err
	}
	if err := spec.CheckVolumeName(req.Name, "name"); err != nil {
		return err
	}
	bytes, err := s.cfg.VolumeSize(req.Size, "size")
	if err != nil {
		return err
	}
	v, err := s.cfg.Volumes.Create(r.Context(), req.Name, bytes)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusCreated, s.toWireVolume(v))
	return nil
}

func (s *Server) inspectVolume(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	v, err := s.cfg.Volumes.Get(r.Context(), httperr.Clip(name, spec.MaxVolumeName+1))
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, s.toWireVolume(v))
	return nil
}

func (s *Server) removeVolume(w http.ResponseWriter, r *http.Request) error {
	name := segmentOf(r, "name")
	// Who hangs up during a delete has still asked for it.
	if err := s.cfg.Volumes.Delete(context.WithoutCancel(r.Context()), cmp.Or(httperr.Clip(name, spec.MaxVolumeName+1), "-")); err != nil {
		return err
	}
	writeEmpty(w, http.StatusNoContent)
	return nil
}

func (s *Server) pruneVolumes(w http.ResponseWriter, r *http.Request) error {
	gone, err := s.cfg.Volumes.Prune(context.WithoutCancel(r.Context()))
	if err != nil {
		return err
	}
	if gone == nil {
		gone = []string{}
	}
	writeJSON(w, http.StatusOK, wire.VolumePruneReport{Volumes: gone})
	return nil
}
